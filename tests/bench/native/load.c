/* Clients in a closed loop: one thread, epoll, keep-alive.
 *
 *   load PORT CONNECTIONS SECONDS STREAM(0|1) BODY_BYTES
 *
 * Each connection asks, reads the answer, asks again; after SECONDS no new request begins, those under way are read to
 * their end (10 s at most). Prints one line of JSON: requests, events, errors and the first of them, seconds, and for
 * time to first token (or to the whole answer) and the gaps between two reads with an event: p50, p99, max in ms.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { BUFFER = 1 << 18, HEAD = 16384, SAMPLES = 4 << 20, MARK = 7 };

typedef struct {
    int fd, busy, head_done, chunked, matched, first;
    size_t sent, head_have;
    long left, events;
    double asked, last;
    char head[HEAD], tail[5];
} conn;

typedef struct { float *at; size_t count; } samples;

static const char mark[MARK + 1] = "data: {";
static char *request, buffer[BUFFER], why[200];
static size_t request_size;
static int port, poller, streaming, stopping, busy;
static long requests, events, errors;
static samples ttft, gaps;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void sample(samples *s, double seconds) {
    if (s->count < SAMPLES) s->at[s->count++] = seconds * 1e3;
}

static void finish(conn *c, const char *wrong) {
    if (c->busy) busy--;
    c->busy = 0;
    if (!wrong) { requests++; return; }
    errors++;
    if (!why[0]) snprintf(why, sizeof why, "%s", wrong);
    close(c->fd);
    c->fd = -1;
}

static void push(conn *c) {
    while (c->sent < request_size) {
        ssize_t n = send(c->fd, request + c->sent, request_size - c->sent, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno != EAGAIN) finish(c, strerror(errno));
            return;
        }
        c->sent += n;
    }
}

static void ask(conn *c) {
    if (c->fd < 0) {
        struct sockaddr_in where = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        int one = 1;
        c->fd = socket(AF_INET, SOCK_STREAM, 0);
        setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (connect(c->fd, (void *)&where, sizeof where)) { finish(c, "cannot connect"); usleep(10000); return; }
        fcntl(c->fd, F_SETFL, O_NONBLOCK);
        struct epoll_event e = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.ptr = c};
        epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &e);
    }
    c->busy = 1, busy++;
    c->head_done = c->chunked = c->matched = 0, c->first = 1, c->sent = c->head_have = 0, c->left = -1;
    memset(c->tail, 0, sizeof c->tail);
    c->asked = now();
    push(c);
}

/* 1 = the answer is whole, 0 = more is to come, -1 = it is over and wrong */
static int take(conn *c, const char *data, size_t size) {
    if (!c->head_done) {
        size_t room = HEAD - 1 - c->head_have, n = size < room ? size : room;
        memcpy(c->head + c->head_have, data, n);
        c->head_have += n, c->head[c->head_have] = 0;
        char *stop = strstr(c->head, "\r\n\r\n");
        if (!stop) return c->head_have == HEAD - 1 ? -1 : 0;
        size_t mine = stop + 4 - c->head - (c->head_have - n);
        stop[2] = 0;
        if (strncmp(c->head + 8, " 200", 4)) { finish(c, c->head); return -1; }
        char *field = strcasestr(c->head, "\r\ncontent-length:");
        if (field) c->left = atol(field + 17);
        c->chunked = strcasestr(c->head, "\r\ntransfer-encoding:") != NULL;
        c->head_done = 1;
        data += mine, size -= mine;
    }
    long seen = 0;
    if (streaming)
        for (size_t i = 0; i < size; i++) { /* the mark has no proper prefix that is also its suffix */
            if (data[i] == mark[c->matched]) {
                if (++c->matched == MARK) seen++, c->matched = 0;
            } else c->matched = data[i] == mark[0];
        }
    if (seen) {
        double at = now();
        if (c->first) sample(&ttft, at - c->asked), c->first = 0;
        else sample(&gaps, at - c->last);
        c->last = at, events += seen;
    }
    if (c->chunked) {
        if (size >= 5) memcpy(c->tail, data + size - 5, 5);
        else memmove(c->tail, c->tail + size, 5 - size), memcpy(c->tail + 5 - size, data, size);
        return !memcmp(c->tail, "0\r\n\r\n", 5);
    }
    c->left -= size;
    return c->left <= 0;
}

static void serve(conn *c, unsigned what) {
    if (c->fd < 0) return;
    if (what & EPOLLOUT && c->busy && c->sent < request_size) push(c);
    while (c->fd >= 0) {
        ssize_t n = recv(c->fd, buffer, BUFFER, 0);
        if (n < 0 && errno == EAGAIN) return;
        if (n <= 0) {
            if (c->busy) finish(c, "cut off in the middle of an answer");
            else close(c->fd), c->fd = -1;
            break;
        }
        if (!c->busy) { finish(c, "bytes that were not asked for"); break; }
        int done = take(c, buffer, n);
        if (done < 0) {
            if (c->busy) finish(c, "an answer that is no HTTP");
            break;
        }
        if (done) {
            if (!streaming) sample(&ttft, now() - c->asked);
            finish(c, NULL);
            if (stopping) return;
            ask(c);
        }
    }
    if (c->fd < 0 && !stopping) ask(c);
}

static int order(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

static void show(const char *name, samples *s) {
    qsort(s->at, s->count, sizeof *s->at, order);
    size_t n = s->count;
    printf(",\"%s\":{\"p50\":%.3f,\"p99\":%.3f,\"max\":%.3f}", name, n ? s->at[n / 2] : 0, n ? s->at[n * 99 / 100] : 0, n ? s->at[n - 1] : 0);
}

int main(int argc, char **argv) {
    if (argc != 6) return fprintf(stderr, "usage: load PORT CONNECTIONS SECONDS STREAM BODY_BYTES\n"), 2;
    port = atoi(argv[1]), streaming = atoi(argv[4]);
    int connections = atoi(argv[2]), body_bytes = atoi(argv[5]);
    double seconds = atof(argv[3]);
    signal(SIGPIPE, SIG_IGN);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    ttft.at = malloc(SAMPLES * sizeof(float)), gaps.at = malloc(SAMPLES * sizeof(float));
    char *body = malloc(body_bytes + 512), *pad = malloc(body_bytes + 1);
    for (int i = 0; i < body_bytes; i++) pad[i] = "lorem ipsum dolor "[i % 18];
    pad[body_bytes] = 0;
    int size = sprintf(body, "{\"model\":\"llama\",\"messages\":[{\"role\":\"user\",\"content\":\"%s\"}],\"stream\":%s}", pad, streaming ? "true" : "false");
    request = malloc(size + 512);
    request_size = sprintf(request, "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", port, size, body);
    poller = epoll_create1(0);
    conn *all = calloc(connections, sizeof *all);
    double begun = now(), stop = begun + seconds;
    for (int i = 0; i < connections; i++) all[i].fd = -1, ask(&all[i]);
    struct epoll_event ready[256];
    for (;;) {
        double left = stop - now();
        if (!stopping && left <= 0) stopping = 1;
        if (stopping && (!busy || left < -10)) break;
        int n = epoll_wait(poller, ready, 256, stopping ? 100 : (int)(left * 1e3) + 1);
        for (int i = 0; i < n; i++) serve(ready[i].data.ptr, ready[i].events);
    }
    double took = now() - begun;
    if (busy) errors += busy, snprintf(why, sizeof why, "%d answers did not end in time", busy);
    for (char *p = why; *p; p++) if (*p == '"' || *p == '\\' || *p < ' ') *p = ' ';
    printf("{\"requests\":%ld,\"events\":%ld,\"errors\":%ld,\"seconds\":%.3f", requests, events, errors, took);
    show("ttft", &ttft), show("gap", &gaps);
    printf(",\"why\":\"%s\"}\n", why);
    return 0;
}
