/* A lock that nobody else holds when a process is forked; see forking.py, which says which and why.

   Whoever forks takes it before, and lets go of it after, in both processes. It is taken for a second at most: where it
   is not to be had, the process is forked as it would be without this. */

#include <pthread.h>

static int (*acquire)(void *lock, long long microseconds, int is_interruptible);
static void (*let_go)(void *lock);
static void *lock;
static __thread int is_held; /* two threads may fork at once */

static void before(void) { is_held = acquire(lock, 1000000, 0) == 1; }

static void after(void)
{
    if (is_held)
        let_go(lock);
    is_held = 0;
}

/* Takes that lock for each fork from here on, by the functions given; called once. 0, or the number of an error. */
int at_fork_hold(void *the_lock, void *its_acquire, void *its_release)
{
    lock = the_lock;
    acquire = (int (*)(void *, long long, int))its_acquire;
    let_go = (void (*)(void *))its_release;
    return pthread_atfork(before, after, after);
}
