/* All-reduce between the ranks of one host, through flags and slots in their segments of shared memory.
 *
 * A tensor goes in pieces. Each rank lays its piece out in a slot of its segment ("A"), reduces its share of all ranks'
 * pieces into its tensor and into its slot ("B", in the place of its own share, which nobody else needs), and copies the
 * shares of the others. A small tensor is laid out whole and reduced whole by everyone, without B.
 *
 * Every A and every B is an event. All ranks have the same events in the same order, A0 A1 B0 A2 B1 A3 ..., so one
 * counter per rank tells what a rank has laid out. A counter is stored and loaded as sequentially consistent: what was
 * laid out before an event can be read after it has been seen, on every processor.
 *
 * Four slots are enough, and nobody waits for leave to write. Piece k + 2 is laid out when all have been seen to have
 * B(k - 1), and so to have reduced A(k - 2), of the same slot. B(k + 2) is written when all have been seen to have
 * A(k + 2), and so to have copied B(k - 2). Between two tensors the same holds: a rank's first event of the next one
 * tells that it has done with the one before.
 *
 * A rank that waits looks for a while, then says in its board what it waits for and leaves it to its caller to sleep on
 * its sockets; who lays that out takes the note from the board and sends a message. The note is written before the
 * counters are looked at once more, the counter before the note is looked for, all sequentially consistent: one of the
 * two sees the other.
 */

#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

enum { SLOTS = 4, LINE = 64, MAX_RANKS = 64, BLOCK = 1024, WAKE_BYTES = 16, LOOKS = 4 };
enum { DONE = 0, WAITS = 1, MISMATCH = 2 }; /* MISMATCH + a rank */

/* At the start of each rank's segment; the slots follow at a page's distance. */
typedef struct {
    _Alignas(LINE) _Atomic uint64_t published; /* events so far */
    _Alignas(LINE) _Atomic uint64_t note;      /* event that is slept for, times 256, plus the rank it must come from, plus 1 */
    _Alignas(LINE) uint64_t calls[2];          /* what the last two tensors are, to compare */
} Board;

typedef void (*Reduce)(void *out, void *copy, const char *const *parts, int num_parts, size_t n, int is_average);

typedef struct {
    int rank, size;
    Board *boards[MAX_RANKS];
    char *slots[MAX_RANKS];
    size_t slot_bytes;
    int links[MAX_RANKS];
    char wake[WAKE_BYTES];
    uint64_t events, pieces, tensors; /* so far, the same on all ranks between tensors */
    /* the tensor at hand */
    char *tensor;
    size_t num_bytes, item_bytes, num_pieces, piece_bytes, share_bytes, k;
    int is_average, is_whole, has_compared;
    Reduce reduce;
    enum { TO_REDUCE, TO_COPY, TO_PUBLISH, TO_COPY_LAST } stage;
    uint64_t awaited, event_a[SLOTS], event_b[SLOTS];
} Group;

/* The parts are added in the order of the ranks, so that all get the same bits. `out` may be one of them, and is then
 * read before it is written, item by item, which is what tells the compiler that it may take many items at once. */
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
    static void NAME(void *out, void *copy, const char *const *parts, int num_parts, size_t n, int is_average)         \
    {                                                                                                                  \
        TYPE total[BLOCK];                                                                                             \
        if (num_parts == 2 && copy && !is_average) {                                                                   \
            NAME##_two(out, copy, (const TYPE *)parts[0], (const TYPE *)parts[1], n);                                  \
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

/* In the order of the types of the Python side. */
static const struct {
    Reduce reduce;
    size_t item_bytes;
} TYPES[] = {
    {reduce_float, sizeof(float)},
    {reduce_double, sizeof(double)},
    {reduce_int32, sizeof(int32_t)},
    {reduce_int64, sizeof(int64_t)},
};

static inline void pause_a_moment(void)
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

static size_t up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

static char *slot_of(const Group *g, int rank, size_t piece)
{
    return g->slots[rank] + (g->pieces + piece) % SLOTS * g->slot_bytes;
}

static size_t length_of(const Group *g, size_t piece)
{
    size_t left = g->num_bytes - piece * g->piece_bytes;
    return left < g->piece_bytes ? left : g->piece_bytes;
}

/* Where the share of a rank in a piece begins, in bytes: in each piece of a tensor at the same place, since the next
 * piece in a slot is laid out around the share in it, which others may still have to copy. */
static size_t share_start(const Group *g, size_t bytes, int rank)
{
    size_t start = g->share_bytes * (size_t)rank;
    return start < bytes ? start : bytes;
}

static void publish(Group *g)
{
    Board *own = g->boards[g->rank];
    atomic_store(&own->published, ++g->events);
    for (int rank = 0; rank < g->size; rank++) {
        if (rank == g->rank)
            continue;
        uint64_t note = atomic_load(&g->boards[rank]->note);
        if ((note & 255) == (uint64_t)g->rank + 1 && note >> 8 <= g->events
            && atomic_compare_exchange_strong(&g->boards[rank]->note, &note, 0))
            /* Where it cannot be sent, the peer has messages to wake it, or is gone. */
            (void)!send(g->links[rank], g->wake, WAKE_BYTES, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
}

static void publish_a(Group *g, size_t piece)
{
    size_t bytes = length_of(g, piece);
    char *slot = slot_of(g, g->rank, piece);
    const char *from = g->tensor + piece * g->piece_bytes;
    size_t start = g->is_whole ? bytes : share_start(g, bytes, g->rank);
    size_t end = g->is_whole ? bytes : share_start(g, bytes, g->rank + 1);
    memcpy(slot, from, start);
    memcpy(slot + end, from + end, bytes - end);
    publish(g);
    g->event_a[piece % SLOTS] = g->events;
}

static void reduce_own(Group *g, size_t piece)
{
    size_t bytes = length_of(g, piece);
    size_t start = g->is_whole ? 0 : share_start(g, bytes, g->rank);
    size_t end = g->is_whole ? bytes : share_start(g, bytes, g->rank + 1);
    char *into = g->tensor + piece * g->piece_bytes + start;
    const char *parts[MAX_RANKS];
    for (int rank = 0; rank < g->size; rank++)
        parts[rank] = rank == g->rank ? into : slot_of(g, rank, piece) + start;
    char *copy = g->is_whole ? NULL : slot_of(g, g->rank, piece) + start;
    g->reduce(into, copy, parts, g->size, (end - start) / g->item_bytes, g->is_average);
}

static void copy_others(Group *g, size_t piece)
{
    size_t bytes = length_of(g, piece);
    char *into = g->tensor + piece * g->piece_bytes;
    for (int rank = 0; rank < g->size; rank++) {
        size_t start = share_start(g, bytes, rank), end = share_start(g, bytes, rank + 1);
        if (rank != g->rank)
            memcpy(into + start, slot_of(g, rank, piece) + start, end - start);
    }
}

static int have_all(const Group *g)
{
    for (int rank = 0; rank < g->size; rank++)
        if (rank != g->rank && atomic_load(&g->boards[rank]->published) < g->awaited)
            return 0;
    return 1;
}

static int look_for_all(Group *g, uint64_t event, uint64_t spin_ns)
{
    g->awaited = event;
    if (have_all(g))
        return 1;
    uint64_t end = now_ns() + spin_ns;
    do {
        for (int i = 0; i < LOOKS; i++) {
            if (have_all(g))
                return 1;
            pause_a_moment();
        }
        sched_yield(); /* to a rank that has to share this core, or to whatever else there is to do */
    } while (now_ns() < end);
    return have_all(g);
}

/* What the group's memory holds, which its owner provides. */
size_t shm_group_bytes(void) { return sizeof(Group); }

/* areas: each rank's board, its slots `board_bytes` behind. links: sockets to the others. wake: the message to send. */
void shm_open(Group *g, int rank, int size, char *const *areas, size_t board_bytes, size_t slot_bytes,
              const int *links, const char *wake)
{
    memset(g, 0, sizeof *g);
    g->rank = rank;
    g->size = size;
    g->slot_bytes = slot_bytes;
    for (int other = 0; other < size; other++) {
        g->boards[other] = (Board *)areas[other];
        g->slots[other] = areas[other] + board_bytes;
        g->links[other] = links[other];
    }
    memcpy(g->wake, wake, WAKE_BYTES);
}

/* Begins to reduce a tensor, which must not be empty, in place; the one before has ended. */
void shm_begin(Group *g, char *tensor, size_t num_items, int type, int is_average, size_t whole_bytes)
{
    g->tensor = tensor;
    g->reduce = TYPES[type].reduce;
    g->item_bytes = TYPES[type].item_bytes;
    g->num_bytes = num_items * g->item_bytes;
    /* Shares are whole lines, so that ranks do not share any; pieces have one size, so that shares have. */
    size_t unit = LINE * (size_t)g->size, most = g->slot_bytes / unit * unit;
    size_t count = up(g->num_bytes, most) / most;
    g->piece_bytes = up((g->num_bytes + count - 1) / count, unit);
    g->share_bytes = g->piece_bytes / (size_t)g->size;
    g->num_pieces = up(g->num_bytes, g->piece_bytes) / g->piece_bytes;
    g->is_average = is_average;
    g->is_whole = g->num_bytes <= whole_bytes && g->num_pieces == 1;
    g->k = 0;
    g->has_compared = 0;
    g->stage = TO_REDUCE;
    g->boards[g->rank]->calls[g->tensors % 2] = (uint64_t)num_items << 8 | (uint64_t)type << 1 | (uint64_t)is_average;
    publish_a(g, 0);
    if (g->num_pieces > 1)
        publish_a(g, 1);
}

/* What a rank has begun: number of items, times 256, plus twice the type, plus whether it is an average. */
uint64_t shm_call(const Group *g, int rank) { return g->boards[rank]->calls[g->tensors % 2]; }

/* Goes on until it is done, or must wait for longer than `spin_ns`, or a rank has begun with another kind of tensor. */
int shm_advance(Group *g, uint64_t spin_ns)
{
    for (;;) {
        size_t k = g->k;
        switch (g->stage) {
        case TO_REDUCE:
            if (!look_for_all(g, g->event_a[k % SLOTS], spin_ns))
                return WAITS;
            for (int rank = 0; rank < g->size && !g->has_compared; rank++)
                if (shm_call(g, rank) != shm_call(g, g->rank))
                    return MISMATCH + rank;
            g->has_compared = 1;
            reduce_own(g, k);
            if (g->is_whole)
                goto done;
            publish(g);
            g->event_b[k % SLOTS] = g->events;
            g->stage = k ? TO_COPY : TO_PUBLISH;
            break;
        case TO_COPY:
            if (!look_for_all(g, g->event_b[(k - 1) % SLOTS], spin_ns))
                return WAITS;
            copy_others(g, k - 1);
            g->stage = TO_PUBLISH;
            break;
        case TO_PUBLISH:
            if (k + 2 < g->num_pieces)
                publish_a(g, k + 2);
            g->k = k + 1;
            g->stage = g->k < g->num_pieces ? TO_REDUCE : TO_COPY_LAST;
            break;
        case TO_COPY_LAST:
            if (!look_for_all(g, g->event_b[(k - 1) % SLOTS], spin_ns))
                return WAITS;
            copy_others(g, k - 1);
            goto done;
        }
    }
done:
    g->pieces += g->num_pieces;
    g->tensors++;
    return DONE;
}

/* Whether this rank waits for something that a rank has not laid out yet. */
int shm_awaits(const Group *g, int rank)
{
    return rank != g->rank && atomic_load(&g->boards[rank]->published) < g->awaited;
}

/* Leaves a note of what this rank is going to sleep for; the rank that it must come from, or -1 if it has come. */
int shm_fall_asleep(Group *g)
{
    Board *own = g->boards[g->rank];
    for (int rank = 0; rank < g->size; rank++) {
        if (!shm_awaits(g, rank))
            continue;
        atomic_store(&own->note, g->awaited << 8 | ((uint64_t)rank + 1));
        if (shm_awaits(g, rank))
            return rank;
        atomic_store(&own->note, 0);
    }
    return -1;
}

/* Takes the note away. */
void shm_wake_up(Group *g) { atomic_store(&g->boards[g->rank]->note, 0); }
