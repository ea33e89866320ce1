// What a page does: fetch with a stream, events taken apart at blank lines, an abort in the middle, an error's body.
const [gateway, model] = process.argv.slice(2);

const ask = (fields, signal) =>
  fetch(`${gateway}/v1/chat/completions`, {
    method: "POST",
    headers: { "content-type": "application/json", "x-session-id": "page" },
    body: JSON.stringify({ model, messages: [{ role: "user", content: "Hello" }], stream: true, ...fields }),
    signal,
  });

async function* events(response) {
  let held = "";
  for await (const piece of response.body.pipeThrough(new TextDecoderStream())) {
    held += piece;
    for (let end; (end = held.indexOf("\n\n")) >= 0; held = held.slice(end + 2)) {
      const line = held.slice(0, end).split("\n").find((l) => l.startsWith("data:"));
      if (line) yield line.slice(5).trim();
    }
  }
}

const whole = { words: 0, done: false };
for await (const data of events(await ask({ max_tokens: 10 }))) {
  if (data === "[DONE]") whole.done = true;
  else if (JSON.parse(data).choices?.[0]?.delta?.content) whole.words += 1;
}

const control = new AbortController();
let aborted = "";
try {
  for await (const _ of events(await ask({ max_tokens: 1500 }, control.signal))) control.abort();
} catch (error) {
  aborted = error.name;
}

const refused = await ask({ model: "nobody" });
const missing = [refused.status, (await refused.json()).error.code];
console.log(JSON.stringify({ whole, aborted, missing }));
