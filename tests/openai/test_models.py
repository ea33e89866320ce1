from __future__ import annotations

import itertools
import json

from llmgw.endpoint import Endpoint, Model
from llmgw.openai.models import merge


def endpoint(name: str, *models: Model) -> Endpoint:
    return Endpoint(id=name, name=name, url=f"http://{name}", models=models)


def test_merges_over_endpoints_whatever_their_order() -> None:
    endpoints = [
        endpoint("a", Model(name="m", max_model_len=4096, aliases=("alias",), loras=("lora",))),
        endpoint("b", Model(name="m", max_model_len=2048, aliases=("alias",))),
        endpoint("c", Model(name="m", loras=("lora",)), Model(name="org/other")),
        endpoint("d", Model(name="lora", max_model_len=9)),
        endpoint("e", Model(name="z", aliases=("m",))),
    ]
    answers = {merge(order, created=7).list for order in itertools.permutations(endpoints)}
    assert len(answers) == 1
    data = json.loads(answers.pop())
    assert data["object"] == "list"
    got = {d["id"]: (d["root"], d["parent"], d["max_model_len"]) for d in data["data"]}
    assert list(got) == sorted(got)
    assert got == {
        "alias": ("m", None, 2048),
        "lora": ("lora", None, 9),
        "m": ("m", None, 2048),
        "org/other": ("org/other", None, None),
        "z": ("z", None, None),
    }
    assert {(d["object"], d["owned_by"], d["created"]) for d in data["data"]} == {("model", "llmgw", 7)}


def test_a_lora_names_its_base_and_each_id_has_a_body() -> None:
    merged = merge([endpoint("a", Model(name="m", loras=("l",)))], created=1)
    assert json.loads(merged.by_id["l"])["parent"] == "m"
    assert [merged.by_id[d["id"]] for d in json.loads(merged.list)["data"]] == list(merged.by_id.values())
    assert json.loads(merge([], created=1).list) == {"object": "list", "data": []}
