/* A fake inference engine: one thread, epoll, no work but the bytes.
 *
 *   engine TOKENS GAP_US        prints the port it listens on (loopback)
 *
 * POST with "stream":true: TOKENS chunks of server-sent events, each its own send(), GAP_US apart (0: as fast as the
 * peer takes them, one of each stream in turn), then usage and [DONE]. Any other POST: a JSON completion.
 * GET /v1/models, /health, /metrics: what a gateway asks an engine. GET /gone: one line for every stream whose peer left
 * before its end, "REQUEST-ID NANOSECONDS" (CLOCK_MONOTONIC), and the list is forgotten.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { FDS = 65536, ROUND = 256, GONE = 65536, MOST = 64 << 20 };

typedef struct conn {
    int fd, streaming, sent, queued, wants_write;
    int64_t due;
    char *in, *out; /* what has come of a request; what the peer has not taken yet */
    size_t in_have, in_room, out_have, out_at, out_room;
    struct conn *next; /* in the queue of streams, by due time: every gap is the same, so appending keeps the order */
    char id[80];
} conn;

static conn *conns[FDS], *head, *tail;
static int poller, timer, tokens;
static int64_t gap_ns;
static char *gone;
static size_t gone_have;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void watch(conn *c, int how) {
    struct epoll_event e = {.events = EPOLLIN | (c->wants_write ? EPOLLOUT : 0), .data.fd = c->fd};
    epoll_ctl(poller, how, c->fd, &e);
}

static void end(conn *c) {
    if (c->streaming && gone_have < (size_t)GONE * 110)
        gone_have += sprintf(gone + gone_have, "%s %lld\n", c->id, (long long)now_ns());
    conns[c->fd] = NULL;
    close(c->fd);
    c->fd = -1;
    free(c->in), free(c->out);
    c->in = c->out = NULL;
    if (!c->queued) free(c); /* else the queue frees it */
}

static int put(conn *c, const char *data, size_t size) {
    if (!c->out_have) {
        ssize_t sent = send(c->fd, data, size, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) return -1;
        if (sent > 0) data += sent, size -= sent;
        if (!size) return 0;
        c->out_at = 0;
    }
    if (c->out_at + c->out_have + size > c->out_room) {
        c->out_room = c->out_at + c->out_have + size + 4096;
        c->out = realloc(c->out, c->out_room);
    }
    memcpy(c->out + c->out_at + c->out_have, data, size);
    c->out_have += size;
    if (!c->wants_write) c->wants_write = 1, watch(c, EPOLL_CTL_MOD);
    return 0;
}

static void enqueue(conn *c, int64_t due) {
    c->due = due, c->queued = 1, c->next = NULL;
    if (tail) tail->next = c;
    else head = c;
    tail = c;
}

static int token(conn *c) {
    char event[512], out[640];
    int last = c->sent >= tokens, n;
    if (!last)
        n = snprintf(event, sizeof event, "data: {\"id\":\"chatcmpl-5f2a8c\",\"object\":\"chat.completion.chunk\",\"created\":1760000000,\"model\":\"llama\","
            "\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word%d\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n", c->sent);
    else
        n = snprintf(event, sizeof event, "data: {\"id\":\"chatcmpl-5f2a8c\",\"object\":\"chat.completion.chunk\",\"created\":1760000000,\"model\":\"llama\","
            "\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":%d,\"total_tokens\":%d}}\n\ndata: [DONE]\n\n", tokens, tokens + 9);
    n = snprintf(out, sizeof out, "%x\r\n%s\r\n%s", n, event, last ? "0\r\n\r\n" : "");
    if (last) c->streaming = 0;
    c->sent++;
    return put(c, out, n);
}

static int answer(conn *c, const char *type, const char *body, size_t size) {
    char out[256];
    int n = snprintf(out, sizeof out, "HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n", type, size);
    char *whole = malloc(n + size);
    memcpy(whole, out, n), memcpy(whole + n, body, size);
    int bad = put(c, whole, n + size);
    free(whole);
    return bad;
}

static int serve(conn *c, char *request, size_t head_size, size_t size) {
    char saved = request[head_size - 1];
    request[head_size - 1] = 0;
    int get = !strncmp(request, "GET ", 4), metrics = get && strstr(request, "/metrics"), models = get && strstr(request, "/models"), left = get && strstr(request, "/gone");
    char *id = strcasestr(request, "\r\nx-request-id:");
    snprintf(c->id, sizeof c->id, "-");
    if (id) sscanf(id + 15, " %79[^ \r\n]", c->id);
    request[head_size - 1] = saved;
    if (left) {
        int bad = answer(c, "text/plain", gone, gone_have);
        gone_have = 0;
        return bad;
    }
    if (metrics) {
        static const char text[] = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name=\"llama\"} 0\n"
            "# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{model_name=\"llama\"} 0\n"
            "# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{model_name=\"llama\"} 0.1\n";
        return answer(c, "text/plain; version=0.0.4", text, sizeof text - 1);
    }
    if (models) {
        static const char text[] = "{\"object\":\"list\",\"data\":[{\"id\":\"llama\",\"object\":\"model\",\"created\":1,\"owned_by\":\"bench\",\"max_model_len\":131072}]}";
        return answer(c, "application/json", text, sizeof text - 1);
    }
    if (get) return answer(c, "application/json", "", 0);
    if (memmem(request + head_size, size - head_size, "\"stream\":true", 13)) {
        static const char text[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
        c->streaming = 1, c->sent = 0;
        enqueue(c, now_ns() + gap_ns);
        return put(c, text, sizeof text - 1);
    }
    static const char text[] = "{\"id\":\"chatcmpl-5f2a8c\",\"object\":\"chat.completion\",\"created\":1760000000,\"model\":\"llama\",\"choices\":[{\"index\":0,"
        "\"message\":{\"role\":\"assistant\",\"content\":\"some words that were asked for\"},\"logprobs\":null,\"finish_reason\":\"stop\"}],"
        "\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":6,\"total_tokens\":15}}";
    return answer(c, "application/json", text, sizeof text - 1);
}

static void parse(conn *c) {
    while (!c->streaming) {
        char *stop = memmem(c->in, c->in_have, "\r\n\r\n", 4);
        if (!stop) return;
        size_t head_size = stop - c->in + 4, length = 0;
        *stop = 0;
        char *field = strcasestr(c->in, "\r\ncontent-length:");
        if (field) length = strtoul(field + 17, NULL, 10);
        *stop = '\r';
        if (c->in_have < head_size + length) return;
        if (serve(c, c->in, head_size, head_size + length)) { end(c); return; }
        c->in_have -= head_size + length;
        memmove(c->in, c->in + head_size + length, c->in_have);
    }
}

static void readable(conn *c) {
    if (c->in_room - c->in_have < 65536) {
        c->in_room = c->in_room * 2 + 65536;
        if (c->in_room > MOST) { end(c); return; }
        c->in = realloc(c->in, c->in_room);
    }
    ssize_t got = recv(c->fd, c->in + c->in_have, c->in_room - c->in_have, 0);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) { end(c); return; }
    c->in_have += got;
    parse(c);
}

static void writable(conn *c) {
    ssize_t sent = send(c->fd, c->out + c->out_at, c->out_have, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) { end(c); return; }
    if (sent > 0) c->out_at += sent, c->out_have -= sent;
    if (c->out_have) return;
    c->wants_write = 0, watch(c, EPOLL_CTL_MOD);
    if (c->streaming && !c->queued) enqueue(c, now_ns());
}

int main(int argc, char **argv) {
    if (argc != 3) return fprintf(stderr, "usage: engine TOKENS GAP_US\n"), 2;
    tokens = atoi(argv[1]), gap_ns = atoll(argv[2]) * 1000;
    signal(SIGPIPE, SIG_IGN);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    gone = malloc((size_t)GONE * 110 + 110);
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct sockaddr_in where = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof where;
    if (bind(listener, (void *)&where, size) || listen(listener, 4096)) return perror("engine"), 1;
    getsockname(listener, (void *)&where, &size);
    printf("%d\n", ntohs(where.sin_port));
    fflush(stdout);
    poller = epoll_create1(0);
    timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    struct epoll_event e = {.events = EPOLLIN, .data.fd = listener}, ready[ROUND];
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &e);
    e.data.fd = timer;
    epoll_ctl(poller, EPOLL_CTL_ADD, timer, &e);
    for (;;) {
        int64_t now = now_ns();
        for (int i = 0; head && head->due <= now && i < 4096; i++) {
            conn *c = head;
            head = c->next;
            if (!head) tail = NULL;
            c->queued = 0;
            if (c->fd < 0) { free(c); continue; }
            if (c->out_have) continue; /* the peer is slow: `writable` takes it up again */
            int bad = token(c);
            if (bad) end(c);
            else if (c->streaming) enqueue(c, (gap_ns ? now_ns() : now) + gap_ns);
            else parse(c); /* what came while it streamed */
        }
        int wait = -1;
        if (head) {
            if (head->due <= now_ns()) wait = 0;
            else {
                struct itimerspec t = {.it_value = {head->due / 1000000000LL, head->due % 1000000000LL}};
                timerfd_settime(timer, TFD_TIMER_ABSTIME, &t, NULL);
            }
        }
        int count = epoll_wait(poller, ready, ROUND, wait);
        for (int i = 0; i < count; i++) {
            int fd = ready[i].data.fd;
            if (fd == timer) {
                uint64_t fired;
                if (read(timer, &fired, sizeof fired) < 0) continue;
            } else if (fd == listener) {
                int new;
                while ((new = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
                    if (new >= FDS) { close(new); continue; }
                    setsockopt(new, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                    conns[new] = calloc(1, sizeof(conn));
                    conns[new]->fd = new;
                    watch(conns[new], EPOLL_CTL_ADD);
                }
            } else {
                if (conns[fd] && ready[i].events & EPOLLOUT) writable(conns[fd]);
                if (conns[fd] && ready[i].events & ~EPOLLOUT) readable(conns[fd]);
            }
        }
    }
}
