/* All-reduce between the ranks of one host, through counters and slots in their segments of shared memory. It is a
 * direct reduce-scatter and all-gather: each rank reduces its shard of a tensor directly from the data of all ranks,
 * and reads the other shards directly from the ranks that have reduced them.
 *
 * A tensor is split into pieces. Each rank writes its piece into a slot of its segment ("A"), reduces its shard of all
 * ranks' pieces into its tensor and into its slot ("B", at the position of its own shard, which no other rank reads in
 * A), and copies the shards of the other ranks. A small tensor is written and reduced as a whole by every rank, without
 * B. Each rank has a progress counter in shared memory. Event k of a tensor is the k-th increment of a rank's counter
 * for this tensor; the increment publishes the data that the rank has written before. With n pieces:
 *
 *     step     waits for all ranks'  reduces its shard   copies other shards   writes      publishes
 *     begin    -                     -                   -                     A(0) A(1)   event 1
 *     0        event 1               A(0) to B(0)        -                     A(2)        event 2
 *     1        event 1               A(1) to B(1)        -                     A(3)        event 3
 *     k        event k               A(k) to B(k)        B(k - 2)              A(k + 2)    event k + 2
 *     n        event n               -                   B(n - 2)              -           -
 *     n + 1    event n + 1           -                   B(n - 1)              -           -
 *
 * Ranks can therefore be one step apart without waiting.
 *
 * Four slots suffice, and no rank waits for permission to write:
 *
 *     data                overwrites                   safe because
 *     A(k + 2), step k    A(k - 2)                     all ranks have reduced it: this rank has read their event k
 *                         not B(k - 2)                 other ranks may still copy it, but it is elsewhere in the slot
 *     B(k), step k        B(k - 4)                     all ranks have copied it in step k - 2
 *     A(0), A(1)          A, B of the previous tensor  they use the slots after its last two pieces; event 1 of a rank
 *                                                      implies that the rank has finished that tensor
 *
 * If the result belongs in shared memory, each rank has a result buffer that all ranks have mapped. The tensor is not
 * split and uses no slots. Each rank writes the shards of the other ranks into its own result buffer, and then reduces
 * its shard from all result buffers into all result buffers. No result is copied back:
 *
 *     step     waits for all ranks'  reduces its shard         writes                         publishes
 *     begin    -                     -                         other shards, into own buffer  event 1
 *     0        event 1               into all result buffers   -                              event 2
 *     1        event 2               -                         -                              -
 *
 * Between event 2 of all ranks and event 1 of the next use, a rank may read and write its result buffer.
 *
 * A rank that waits polls for a while, then sleeps, with Dekker's handshake: it stores the awaited event in its control
 * block (the wake request), reads the counters again, and its process sleeps on the sockets. A rank that publishes
 * increments its counter, then reads the wake requests, clears a request for this event, and sends a message. All four
 * accesses are sequentially consistent: at least one of the two ranks reads what the other has stored. The order that
 * makes data visible with the counter, release and acquire, is part of sequential consistency.
 */

#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

enum { SLOTS = 4, LINE = 64, MAX_RANKS = 64, BLOCK = 512, WAKE_BYTES = 16, POLLS = 4 };
enum { DONE = 0, WAITS = 1, MISMATCH = 2 };

/* Control block at the start of each rank's segment; the slots begin one page after it. */
typedef struct {
    _Alignas(LINE) _Atomic uint64_t published;    /* progress counter: number of events */
    _Alignas(LINE) _Atomic uint64_t wake_request; /* awaited event, times 256, plus its publisher's rank, plus 1 */
    _Alignas(LINE) uint64_t calls[2];             /* last two operations, as `all_reduce_call` returns them */
    uint64_t identities[2];                       /* their identities, see identities.py */
} ControlBlock;

/* Fields of an identity: kind, bucket, batch. As in identities.py. */
static const uint64_t FIELDS[] = {0xff, 0xffff00, 0xffffffffff000000};

typedef void (*Reduce)(void *out, void *copy, const char *const *parts, int num_parts, size_t n, int is_average);

typedef struct {
    int rank, size;
    ControlBlock *blocks[MAX_RANKS];
    char *slots[MAX_RANKS];
    size_t slot_bytes;
    int links[MAX_RANKS];
    char wake[WAKE_BYTES];
    uint64_t events, pieces, tensors; /* counts, equal on all ranks between tensors */
    /* the current tensor */
    char *tensor;
    char *results[MAX_RANKS]; /* result buffers, if has_results */
    size_t num_bytes, item_bytes, num_pieces, piece_bytes, shard_bytes, step;
    int is_average, is_whole, has_results, has_compared;
    Reduce reduce;
    uint64_t first_event, awaited;
} Group;

/* The parts are added in rank order, so that results are bitwise equal on all ranks. `out` may be one of the parts:
 * each item is read before it is written. INDEPENDENT declares this, so that the compiler can vectorize the loop. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

#define REDUCE(NAME, TYPE)                                                                                             \
    static void NAME##_two(TYPE *out, TYPE *copy, const TYPE *a, const TYPE *b, size_t n)                              \
    {                                                                                                                  \
        INDEPENDENT                                                                                                    \
        for (size_t i = 0; i < n; i++) {                                                                               \
            TYPE total = a[i] + b[i];                                                                                  \
            out[i] = total;                                                                                            \
            copy[i] = total;                                                                                           \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    static void NAME##_average_of_two(TYPE *out, TYPE *copy, const TYPE *a, const TYPE *b, size_t n)                   \
    {                                                                                                                  \
        INDEPENDENT                                                                                                    \
        for (size_t i = 0; i < n; i++) {                                                                               \
            TYPE average = (a[i] + b[i]) / 2;                                                                          \
            out[i] = average;                                                                                          \
            copy[i] = average;                                                                                         \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    static void NAME(void *out, void *copy, const char *const *parts, int num_parts, size_t n, int is_average)         \
    {                                                                                                                  \
        TYPE total[BLOCK];                                                                                             \
        if (num_parts == 2 && copy) {                                                                                  \
            (is_average ? NAME##_average_of_two : NAME##_two)(out, copy, (const TYPE *)parts[0],                       \
                                                              (const TYPE *)parts[1], n);                              \
            return;                                                                                                    \
        }                                                                                                              \
        for (size_t start = 0; start < n; start += BLOCK) {                                                            \
            size_t length = n - start < BLOCK ? n - start : BLOCK;                                                     \
            const TYPE *a = (const TYPE *)parts[0] + start, *b = (const TYPE *)parts[1] + start;                       \
            for (size_t i = 0; i < length; i++)                                                                        \
                total[i] = a[i] + b[i];                                                                                \
            for (int part = 2; part < num_parts; part++) {                                                             \
                const TYPE *c = (const TYPE *)parts[part] + start;                                                     \
                for (size_t i = 0; i < length; i++)                                                                    \
                    total[i] += c[i];                                                                                  \
            }                                                                                                          \
            if (is_average)                                                                                            \
                for (size_t i = 0; i < length; i++)                                                                    \
                    total[i] /= (TYPE)num_parts;                                                                       \
            memcpy((TYPE *)out + start, total, length * sizeof(TYPE));                                                 \
            if (copy)                                                                                                  \
                memcpy((TYPE *)copy + start, total, length * sizeof(TYPE));                                            \
        }                                                                                                              \
    }

REDUCE(reduce_float, float)
REDUCE(reduce_double, double)
REDUCE(reduce_int32, int32_t)
REDUCE(reduce_int64, int64_t)

/* In the order of `_TYPES` in native.py. */
static const struct {
    Reduce reduce;
    size_t item_bytes;
} TYPES[] = {
    {reduce_float, sizeof(float)},
    {reduce_double, sizeof(double)},
    {reduce_int32, sizeof(int32_t)},
    {reduce_int64, sizeof(int64_t)},
};

static inline void pause_core(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

/* A rank's shard of a piece: its offset in the tensor and its size, in bytes. Shards have the same position in all
 * pieces of a tensor, because the next piece in a slot is written around the shard in it. */
typedef struct {
    size_t start, bytes;
} Span;

static Span shard_of(const Group *g, size_t piece, int rank)
{
    size_t start = piece * g->piece_bytes + (size_t)rank * g->shard_bytes;
    size_t left = start < g->num_bytes ? g->num_bytes - start : 0;
    return (Span){start, left < g->shard_bytes ? left : g->shard_bytes};
}

/* Returns the address of a span of a piece in a rank's slot. */
static char *slot_of(const Group *g, int rank, size_t piece, Span span)
{
    char *slot = g->slots[rank] + (g->pieces + piece) % SLOTS * g->slot_bytes;
    return slot + (span.start - piece * g->piece_bytes);
}

static void publish(Group *g)
{
    ControlBlock *own = g->blocks[g->rank];
    atomic_store(&own->published, ++g->events);
    for (int rank = 0; rank < g->size; rank++) {
        if (rank == g->rank)
            continue;
        uint64_t request = atomic_load(&g->blocks[rank]->wake_request);
        if ((request & 255) == (uint64_t)g->rank + 1 && request >> 8 <= g->events
            && atomic_compare_exchange_strong(&g->blocks[rank]->wake_request, &request, 0))
            /* If sending fails, the peer has other messages that wake it, or has exited. */
            (void)!send(g->links[rank], g->wake, WAKE_BYTES, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
}

static void write_other_shards(Group *g, size_t piece)
{
    for (int rank = 0; rank < g->size; rank++) {
        Span span = shard_of(g, piece, rank);
        if (rank != g->rank && span.bytes)
            memcpy(slot_of(g, g->rank, piece, span), g->tensor + span.start, span.bytes);
    }
}

static void copy_results(Group *g, size_t piece)
{
    for (int rank = 0; rank < g->size; rank++) {
        Span span = shard_of(g, piece, rank);
        if (rank != g->rank && span.bytes)
            memcpy(g->tensor + span.start, slot_of(g, rank, piece, span), span.bytes);
    }
}

static void reduce_span(Group *g, size_t piece, Span span)
{
    const char *parts[MAX_RANKS];
    char *into = g->tensor + span.start;
    if (!span.bytes)
        return;
    for (int rank = 0; rank < g->size; rank++)
        parts[rank] = rank == g->rank ? into : slot_of(g, rank, piece, span);
    char *copy = g->is_whole ? NULL : slot_of(g, g->rank, piece, span);
    g->reduce(into, copy, parts, g->size, span.bytes / g->item_bytes, g->is_average);
}

/* Writes the shards of the other ranks into this rank's result buffer. A tensor with result buffers is one piece. */
static void write_other_shards_to_result(Group *g)
{
    for (int rank = 0; rank < g->size; rank++) {
        Span span = shard_of(g, 0, rank);
        if (rank != g->rank && span.bytes)
            memcpy(g->results[g->rank] + span.start, g->tensor + span.start, span.bytes);
    }
}

/* Reduces this rank's shard into all result buffers. */
static void reduce_into_results(Group *g)
{
    const char *parts[MAX_RANKS];
    Span span = shard_of(g, 0, g->rank);
    int next = (g->rank + 1) % g->size;
    if (!span.bytes)
        return;
    for (int rank = 0; rank < g->size; rank++)
        parts[rank] = (rank == g->rank ? g->tensor : g->results[rank]) + span.start;
    char *into = g->results[g->rank] + span.start;
    g->reduce(into, g->results[next] + span.start, parts, g->size, span.bytes / g->item_bytes, g->is_average);
    for (int rank = 0; rank < g->size; rank++)
        if (rank != g->rank && rank != next)
            memcpy(g->results[rank] + span.start, into, span.bytes);
}

static void do_step(Group *g, size_t k)
{
    if (g->has_results) {
        if (k == 0) {
            reduce_into_results(g);
            publish(g);
        }
        return;
    }
    if (k < g->num_pieces)
        reduce_span(g, k, shard_of(g, k, g->rank));
    if (k >= 2)
        copy_results(g, k - 2);
    if (k + 2 < g->num_pieces)
        write_other_shards(g, k + 2);
    if (k < g->num_pieces)
        publish(g);
}

static int have_all(const Group *g)
{
    for (int rank = 0; rank < g->size; rank++)
        if (rank != g->rank && atomic_load(&g->blocks[rank]->published) < g->awaited)
            return 0;
    return 1;
}

static int poll_for_all(Group *g, uint64_t event, uint64_t poll_ns)
{
    g->awaited = event;
    if (have_all(g))
        return 1;
    uint64_t end = now_ns() + poll_ns;
    do {
        for (int i = 0; i < POLLS; i++) {
            if (have_all(g))
                return 1;
            pause_core();
        }
        sched_yield(); /* to a rank or another process on the same core */
    } while (now_ns() < end);
    return have_all(g);
}

/* Returns the size of a Group, for which the caller allocates memory. */
size_t all_reduce_group_bytes(void) { return sizeof(Group); }

/* Initializes a Group. areas: each rank's control block, with its slots at offset `control_bytes`. links: sockets to
 * the other ranks. wake: message that wakes a rank. */
void all_reduce_open(Group *g, int rank, int size, char *const *areas, size_t control_bytes, size_t slot_bytes,
              const int *links, const char *wake)
{
    memset(g, 0, sizeof *g);
    g->rank = rank;
    g->size = size;
    g->slot_bytes = slot_bytes;
    for (int other = 0; other < size; other++) {
        g->blocks[other] = (ControlBlock *)areas[other];
        g->slots[other] = areas[other] + control_bytes;
        g->links[other] = links[other];
    }
    memcpy(g->wake, wake, WAKE_BYTES);
}

/* Begins to reduce a nonempty tensor, after the previous operation has ended. The result is written to the result
 * buffers, one per rank; this rank's result buffer may be the tensor itself. Without result buffers (NULL), the result
 * is written to the tensor. The identity states what the tensor is for; 0 if it is unknown. */
void all_reduce_begin(Group *g, char *tensor, size_t num_items, int type, int is_average, size_t whole_bytes,
                      char *const *results, uint64_t identity)
{
    g->tensor = tensor;
    g->reduce = TYPES[type].reduce;
    g->item_bytes = TYPES[type].item_bytes;
    g->num_bytes = num_items * g->item_bytes;
    /* Shards are whole cache lines, so that no two ranks write to one line. Pieces, and so shards, have one size. */
    size_t unit = LINE * (size_t)g->size, most = g->slot_bytes / unit * unit;
    size_t count = results ? 1 : round_up(g->num_bytes, most) / most;
    g->piece_bytes = round_up((g->num_bytes + count - 1) / count, unit);
    g->shard_bytes = g->piece_bytes / (size_t)g->size;
    g->num_pieces = round_up(g->num_bytes, g->piece_bytes) / g->piece_bytes;
    g->is_average = is_average;
    g->has_results = results != NULL;
    g->is_whole = !results && g->num_bytes <= whole_bytes && g->num_pieces == 1;
    g->step = 0;
    g->has_compared = 0;
    g->first_event = g->events;
    g->blocks[g->rank]->calls[g->tensors % 2] =
        (uint64_t)num_items << 8 | (uint64_t)g->has_results << 7 | (uint64_t)type << 1 | (uint64_t)is_average;
    g->blocks[g->rank]->identities[g->tensors % 2] = identity;
    if (results) {
        memcpy(g->results, results, (size_t)g->size * sizeof *results);
        if (tensor != results[g->rank])
            write_other_shards_to_result(g);
    } else if (g->is_whole)
        memcpy(g->slots[g->rank] + g->pieces % SLOTS * g->slot_bytes, tensor, g->num_bytes);
    else
        for (size_t piece = 0; piece < 2 && piece < g->num_pieces; piece++)
            write_other_shards(g, piece);
    publish(g);
}

/* Returns the operation of a rank as a sum: the number of items, times 256; 128 if the result belongs in shared memory;
 * twice the type; and 1 if it is an average. */
uint64_t all_reduce_call(const Group *g, int rank) { return g->blocks[rank]->calls[g->tensors % 2]; }

/* Returns the identity of a rank's operation. */
uint64_t all_reduce_identity(const Group *g, int rank) { return g->blocks[rank]->identities[g->tensors % 2]; }

/* Returns whether ranks have begun different operations. A field of an identity that is 0 does not differ, so each rank
 * compares the fields of all ranks with each other, and all ranks come to the same result. */
static int differ(const Group *g)
{
    uint64_t known = 0;
    for (int rank = 0; rank < g->size; rank++) {
        uint64_t identity = all_reduce_identity(g, rank);
        if (all_reduce_call(g, rank) != all_reduce_call(g, g->rank))
            return 1;
        for (int i = 0; i < 3 && identity != known; i++) {
            uint64_t here = identity & FIELDS[i], before = known & FIELDS[i];
            if (here && before && here != before)
                return 1;
            known |= here;
        }
    }
    return 0;
}

/* Continues until the end, or a wait longer than `poll_ns`, or until a rank has begun a different operation. */
int all_reduce_advance(Group *g, uint64_t poll_ns)
{
    size_t num_steps = g->is_whole ? 1 : g->has_results ? 2 : g->num_pieces + 2;
    for (; g->step < num_steps; g->step++) {
        size_t event = g->has_results ? g->step + 1 : g->step ? g->step : 1;
        if (!poll_for_all(g, g->first_event + event, poll_ns))
            return WAITS;
        if (!g->has_compared && differ(g))
            return MISMATCH;
        g->has_compared = 1;
        if (g->is_whole) {
            reduce_span(g, 0, (Span){0, g->num_bytes});
            break;
        }
        do_step(g, g->step);
    }
    g->pieces += g->has_results ? 0 : g->num_pieces; /* only these have used slots */
    g->tensors++;
    return DONE;
}

/* Returns whether this rank waits for an event that a rank has not published yet. */
int all_reduce_awaits(const Group *g, int rank)
{
    return rank != g->rank && atomic_load(&g->blocks[rank]->published) < g->awaited;
}

/* Stores a wake request for the awaited event. Returns the rank that must publish it, or -1 if no rank is missing. */
int all_reduce_fall_asleep(Group *g)
{
    ControlBlock *own = g->blocks[g->rank];
    for (int rank = 0; rank < g->size; rank++) {
        if (!all_reduce_awaits(g, rank))
            continue;
        atomic_store(&own->wake_request, g->awaited << 8 | ((uint64_t)rank + 1));
        if (all_reduce_awaits(g, rank))
            return rank;
        atomic_store(&own->wake_request, 0);
    }
    return -1;
}

/* Clears the wake request. */
void all_reduce_wake_up(Group *g) { atomic_store(&g->blocks[g->rank]->wake_request, 0); }
