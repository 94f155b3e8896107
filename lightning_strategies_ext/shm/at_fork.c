/* Holds a lock while a process is forked; forking.py explains which lock, and why.

   The forking thread acquires the lock before the fork, and releases it afterwards in both processes. It waits for one
   second at most; after that the process is forked without the lock. */

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

/* Makes each later fork hold the lock, with the given functions; called once. Returns 0 or an error number. */
int at_fork_hold(void *the_lock, void *its_acquire, void *its_release)
{
    lock = the_lock;
    acquire = (int (*)(void *, long long, int))its_acquire;
    let_go = (void (*)(void *))its_release;
    return pthread_atfork(before, after, after);
}
