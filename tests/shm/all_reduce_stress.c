/* Ranks as threads of one process, for the compiler's thread sanitizer: it follows C11's rules for what one thread may
 * see of another's writes, and so finds what would fail on Arm though it never does on x86-64.
 *
 *     all_reduce_stress RANKS TENSORS SLEEPS
 *
 * Each rank all-reduces tensors of random sizes and types and checks every item. Some results go into result
 * buffers; a rank's own buffer is sometimes the tensor itself. With SLEEPS, a rank that has to wait sleeps on its
 * sockets, as in the process group. A rank that is not woken ends the program with an error. */
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "all_reduce.c"

enum { BOARD_BYTES = 4096, SLOT_BYTES = 4096, MOST_ITEMS = 20000, POLL_NS = 2000, PATIENCE_MS = 10000 };

static int size, num_tensors, sleeps;
static char *areas[MAX_RANKS], *results[MAX_RANKS];
static int links[MAX_RANKS][MAX_RANKS];

static void fail(const char *what, int rank, int tensor)
{
    fprintf(stderr, "rank %d, tensor %d: %s\n", rank, tensor, what);
    exit(1);
}

static void wait_for_others(Group *g, int rank, int tensor)
{
    int from = all_reduce_fall_asleep(g);
    if (from < 0)
        return;
    struct pollfd link = {links[rank][from], POLLIN, 0};
    if (poll(&link, 1, PATIENCE_MS) != 1)
        fail("it was not woken", rank, tensor);
    all_reduce_wake_up(g);
    char message[WAKE_BYTES];
    while (recv(links[rank][from], message, sizeof message, MSG_DONTWAIT) > 0)
        ;
}

#define CHECK(TYPE)                                                                                                    \
    for (size_t i = 0; i < n; i++)                                                                                     \
        ((TYPE *)items)[i] = (TYPE)(rank + (int)i % 7);                                                                \
    all_reduce_begin(g, items, n, type, 0, whole, has_results ? results : NULL, 0);                                    \
    while ((state = all_reduce_advance(g, POLL_NS)) != DONE) {                                                         \
        if (state != WAITS)                                                                                            \
            fail("ranks differ", rank, tensor);                                                                        \
        if (sleeps)                                                                                                    \
            wait_for_others(g, rank, tensor);                                                                          \
    }                                                                                                                  \
    for (size_t i = 0; i < n; i++)                                                                                     \
        if (((TYPE *)result)[i] != (TYPE)(size * (size - 1) / 2 + size * ((int)i % 7)))                                \
            fail("wrong sum", rank, tensor);

static void *work(void *argument)
{
    int rank = (int)(intptr_t)argument, state;
    unsigned seed = 1, own_seed = (unsigned)rank;
    char *own = malloc(MOST_ITEMS * 8);
    Group *g = malloc(all_reduce_group_bytes());
    all_reduce_open(g, rank, size, areas, BOARD_BYTES, SLOT_BYTES, links[rank], "0123456789abcdef");
    for (int tensor = 0; tensor < num_tensors; tensor++) {
        size_t n = 1 + (size_t)rand_r(&seed) % (rand_r(&seed) % 3 ? MOST_ITEMS : 100);
        int type = rand_r(&seed) % 4;
        size_t whole = rand_r(&seed) % 2 ? 2048 : 0;
        int has_results = rand_r(&seed) % 3 == 0;
        char *result = has_results ? results[rank] : own;
        char *items = rand_r(&own_seed) % 2 ? result : own;
        if (rand_r(&own_seed) % 20 == 0)
            usleep(200);
        switch (type) {
        case 0: CHECK(float) break;
        case 1: CHECK(double) break;
        case 2: CHECK(int32_t) break;
        case 3: CHECK(int64_t) break;
        }
    }
    free(own);
    return g; /* no thread reads it after all have ended */
}

int main(int count, char **arguments)
{
    if (count != 4)
        return 2;
    size = atoi(arguments[1]);
    num_tensors = atoi(arguments[2]);
    sleeps = atoi(arguments[3]);
    pthread_t threads[MAX_RANKS];
    for (int rank = 0; rank < size; rank++) {
        areas[rank] = aligned_alloc(BOARD_BYTES, BOARD_BYTES + SLOTS * SLOT_BYTES);
        results[rank] = aligned_alloc(LINE, MOST_ITEMS * 8);
        memset(areas[rank], 0, BOARD_BYTES + SLOTS * SLOT_BYTES);
        for (int other = 0; other < rank; other++) {
            int ends[2];
            if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends))
                return 2;
            links[rank][other] = ends[0];
            links[other][rank] = ends[1];
        }
    }
    for (int rank = 0; rank < size; rank++)
        pthread_create(&threads[rank], NULL, work, (void *)(intptr_t)rank);
    for (int rank = 0; rank < size; rank++) {
        void *group;
        pthread_join(threads[rank], &group);
        free(group);
    }
    puts("all sums are right");
    return 0;
}
