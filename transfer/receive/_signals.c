/* Look at the signals of writers' streams, and queue the scatters behind them.
 *
 * The layout of the words is that of transfer/transport/signals.py. A look needs no GIL, which an engine can hold for milliseconds.
 * If the scatter of a gather was prepared (`arm`), a look queues it when the gather begins, behind the word that reports the end of the
 * gather. A later look reports the end of the scatter by an eventfd. Without a prepared scatter, looks report the end of the gather.
 *
 * A thread looks regularly. While news are near, the owner's loop looks itself instead of sleeping (`poll`): its processor is awake and
 * has its memory in its caches, so Python handles the news several times sooner.
 *
 * The gate is the lock of sessions, launches and reports. The owner's thread holds it while it decides about grants, so no scatter is
 * queued meanwhile.
 *
 * A stream waits for a limited time. A second thread enforces the limits, because the first one can be in a call of CUDA that returns only
 * when the stream is done.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { ENTRY_WORDS = 8, NUM_ENTRIES = 127 };
enum { NUM_CLOSED, IS_STOPPED };                       /* words of entry 0 */
enum { QUEUED, GRANT, BEGUN, BASE, TOTAL, ENDED, HAS_HALVES, HALF_ENDED }; /* words of the other entries */
enum { FREE, TAKEN, WAITS, CLOSED };                   /* states of an entry: WAITS for the end of its gather, without a scatter */
enum { ARMED, RUNS, DONE };                            /* states of a launch */

static const int64_t LEAST_PAUSE_NS = 10 * 1000, RUNNING_PAUSE_NS = 25 * 1000, NEAR_PAUSE_NS = 100 * 1000, FAR_PAUSE_NS = 2 * 1000 * 1000;
static const int64_t SPARE_PAUSE_NS = 500 * 1000; /* of the thread while the owner's loop looks, too */
enum { FEW = 4 };          /* gathers of a lone request: each delay of a look delays the request */
enum { PAUSE_SHARE = 16 }; /* a pause is this part of the time without news */
enum { LATE_SHARE = 500 }; /* a pause is this part of the time since a gather was queued, if that is longer: its writer can hang */
static const int64_t LONG_GATHER_NS = 50 * 1000; /* the owner needs 0.1 ms for the start of a scatter */
static const int64_t MOST_SPIN_NS = 250 * 1000; /* a scatter of 400 MB on an H200, or some wake-ups of a thread */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static uint64_t load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

static void store(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

/* Time limits of streams that wait for the end of a gather */

typedef struct Limit {
    struct Limit *next;
    int64_t timeout_ns, ends_ns;
    int has_given_up;
    uint64_t *words, *half, *end, number; /* half: the same as end if the stream does not wait for a half */
} Limit;

static pthread_mutex_t limits_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t limits_changed;
static Limit *limits;
static int has_limits_thread;

/* Give up a gather, unless it has ended. First the writer's signals are stopped, so a message follows when the gather ends, and then the
 * wait ends. CUDA compares cyclically, and a hostile writer can write any number: so the word is written unless it is the number itself.
 * Returns whether it was written. */
static int end_wait(const Limit *limit) {
    if (load(limit->end) == limit->number && load(limit->half) == limit->number)
        return 0;
    store(limit->words + IS_STOPPED, 1);
    store(limit->half, limit->number);
    store(limit->end, limit->number);
    return 1;
}

/* Give up the gathers whose time is up. A hostile writer can write at any time: so the words are read again after the same time. */
static void give_up(int64_t now) {
    for (Limit *limit = limits; limit != NULL; limit = limit->next) {
        if (limit->ends_ns > now)
            continue;
        limit->ends_ns = now + limit->timeout_ns;
        limit->has_given_up |= end_wait(limit);
    }
}

static void *keep_limits(void *Py_UNUSED(unused)) {
    pthread_mutex_lock(&limits_lock);
    for (;;) {
        int64_t first = INT64_MAX;
        for (Limit *limit = limits; limit != NULL; limit = limit->next)
            if (limit->ends_ns < first)
                first = limit->ends_ns;
        if (first == INT64_MAX) {
            pthread_cond_wait(&limits_changed, &limits_lock);
            continue;
        }
        struct timespec until = {.tv_sec = first / 1000000000, .tv_nsec = first % 1000000000};
        pthread_cond_timedwait(&limits_changed, &limits_lock, &until);
        give_up(now_ns());
    }
    return NULL;
}

/* A forked child has neither the thread nor the streams. */
static void forget_limits(void) {
    pthread_mutex_init(&limits_lock, NULL);
    limits = NULL;
    has_limits_thread = 0;
}

/* Signals of the process are for Python's threads. Returns an error number. */
static int start_thread(pthread_t *thread, void *(*run)(void *), void *argument) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

static void init_condition(pthread_cond_t *condition) {
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &clock);
    pthread_condattr_destroy(&clock);
}

/* The caller holds the lock. Returns an error number. */
static int start_limits_thread(void) {
    static int has_fork_handler;
    pthread_t thread;
    if (!has_fork_handler && pthread_atfork(NULL, NULL, forget_limits) != 0)
        return ENOMEM;
    has_fork_handler = 1;
    init_condition(&limits_changed);
    int error = start_thread(&thread, keep_limits, NULL);
    if (error == 0)
        error = pthread_detach(thread);
    has_limits_thread = error == 0;
    return error;
}

/* Returns NULL, and sets errno, if there is no memory or no thread. */
static Limit *begin_limit(uint64_t *words, uint64_t *half, uint64_t *end, uint64_t number, int64_t timeout_ns) {
    Limit *limit = calloc(1, sizeof *limit);
    if (limit == NULL)
        return NULL;
    *limit = (Limit){.words = words, .half = half, .end = end, .number = number, .timeout_ns = timeout_ns, .ends_ns = now_ns() + timeout_ns};
    pthread_mutex_lock(&limits_lock); /* held only briefly */
    int error = has_limits_thread ? 0 : start_limits_thread();
    if (error == 0) {
        limit->next = limits;
        limits = limit;
        pthread_cond_signal(&limits_changed);
    }
    pthread_mutex_unlock(&limits_lock);
    if (error != 0) {
        free(limit);
        errno = error;
        return NULL;
    }
    return limit;
}

/* Returns whether the gather was given up. */
static int end_limit(Limit *ended) {
    int has_given_up = 0;
    pthread_mutex_lock(&limits_lock);
    for (Limit **place = &limits; *place != NULL; place = &(*place)->next) {
        if (*place != ended)
            continue;
        *place = ended->next;
        has_given_up = ended->has_given_up;
        free(ended);
        break;
    }
    pthread_mutex_unlock(&limits_lock);
    return has_given_up;
}

/* The watch */

/* The functions of CUDA's driver API that queue a scatter. */
typedef struct {
    int (*push_context)(void *context);
    int (*pop_context)(void **context);
    int (*wait)(void *stream, uint64_t address, uint64_t value, unsigned flags);
    int (*launch)(void *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned threads, unsigned, unsigned, unsigned shared_bytes,
                  void *stream, void **parameters, void **extra);
    int (*copy_to_host)(void *target, uint64_t source, size_t num_bytes, void *stream);
    int (*write)(void *stream, uint64_t address, uint64_t value, unsigned flags);
} Driver;

enum { WAIT_UNTIL_AT_LEAST = 0, WRITE_AFTER_ALL_BEFORE = 0 };                  /* CU_STREAM_WAIT_VALUE_GEQ, CU_STREAM_WRITE_VALUE_DEFAULT */
#define PARAMETERS_ADDRESS ((void *)1)                                         /* CU_LAUNCH_PARAM_BUFFER_POINTER */
#define PARAMETERS_SIZE ((void *)2)                                            /* CU_LAUNCH_PARAM_BUFFER_SIZE */

typedef struct {
    void *function;
    unsigned grid_x, grid_y, threads, shared_bytes;
    void *parameters;
    size_t num_bytes;
} Kernel;

typedef struct Session {
    struct Session *next;
    uint64_t number;
    uint64_t *words;
    uint64_t device_words; /* the address of the words for streams */
    void *context;
    int num_awaited, is_stopped, is_distrusted, num_waiting;
    uint64_t num_taken, num_closed;
    uint64_t num_queued; /* of the last entry that a look found queued */
    int64_t queued_ns;   /* time of that look */
    unsigned char entries[NUM_ENTRIES];
} Session;

typedef struct Launch {
    struct Launch *next;
    Session *session; /* NULL once it is removed */
    uint64_t grant, number;
    int state, is_reported, is_taken; /* reported and taken: that it runs */
    void *stream;
    uint64_t sum;   /* address on the device */
    uint64_t *cell; /* the sum after the scatter, and the number of the launch once it has ended */
    Limit *limit;
    int is_given_up;
    uint64_t *entry, found, announced;
    int64_t queued_ns, gathered_ns, ended_ns;
    Py_ssize_t num_kernels, num_first; /* first: those that only need the first half of the gather */
    Kernel kernels[];
} Launch;

typedef struct Gathered { /* a gather that has ended, and has no scatter */
    struct Gathered *next;
    uint64_t session, grant, number, digest;
} Gathered;

typedef struct {
    pthread_mutex_t gate; /* recursive */
    pthread_cond_t changed;
    pthread_t thread;
    pid_t pid;
    int has_thread, is_closing, has_news, has_reports, error, event_fd;
    int has_polled, is_polled, wants_poll; /* by the owner's loop: ever, now, as soon as the thread does not look */
    int64_t limit_ns, news_ns;
    Driver driver;
    Session *sessions;
    Launch *launches;
    Gathered *gathered, **last_gathered;
} State;

typedef struct {
    PyObject_HEAD State *state;
} Watch;

static uint64_t *entry_of(const Session *session, uint64_t number) {
    return session->words + (1 + (number - 1) % NUM_ENTRIES) * ENTRY_WORDS;
}

static unsigned char *status_of(Session *session, uint64_t number) { return session->entries + (number - 1) % NUM_ENTRIES; }

static int is_full(const Session *session) { return session->num_taken - session->num_closed >= NUM_ENTRIES; }

static int is_watched(const Session *session) { return session->num_awaited > 0 && !session->is_stopped; }

static void report(State *state) {
    uint64_t one = 1;
    state->has_reports = 1;
    if (write(state->event_fd, &one, sizeof one) < 0) {
        /* the counter is full, so the owner is woken already */
    }
}

static void stop_session(Session *session) {
    session->is_stopped = 1;
    store(session->words + IS_STOPPED, 1);
}

static void close_entry(Session *session, uint64_t number) {
    *status_of(session, number) = CLOSED;
    while (session->num_closed < session->num_taken && *status_of(session, session->num_closed + 1) == CLOSED)
        *status_of(session, ++session->num_closed) = FREE;
    store(session->words + NUM_CLOSED, session->num_closed);
}

/* Queue a wait for a word of the launch's entry. Returns an error of CUDA. */
static int queue_wait(const State *state, const Launch *launch, int word) {
    const Session *session = launch->session;
    uint64_t address = session->device_words + (uint64_t)((char *)(launch->entry + word) - (char *)session->words);
    return state->driver.wait(launch->stream, address, launch->number, WAIT_UNTIL_AT_LEAST);
}

static int queue_kernel(const State *state, const Launch *launch, Kernel *kernel) {
    void *extra[] = {PARAMETERS_ADDRESS, kernel->parameters, PARAMETERS_SIZE, &kernel->num_bytes, NULL};
    return state->driver.launch(kernel->function, kernel->grid_x, kernel->grid_y, 1, kernel->threads, 1, 1, kernel->shared_bytes,
                                launch->stream, NULL, extra);
}

/* Queue a scatter behind the end of its gather, or each half behind that half. Returns an error of CUDA, or -1 if the wait has no limit. */
static int queue_launch(State *state, Launch *launch, uint64_t number) {
    Session *session = launch->session;
    const Driver *driver = &state->driver;
    launch->number = number;
    launch->entry = entry_of(session, number);
    Py_ssize_t num_first = load(launch->entry + HAS_HALVES) == 1 ? launch->num_first : 0;
    store(launch->cell + 1, 0);
    /* Before the stream waits: a launch can wait for the stream. */
    uint64_t *end = launch->entry + ENDED, *half = num_first > 0 ? launch->entry + HALF_ENDED : end;
    launch->limit = begin_limit(session->words, half, end, number, state->limit_ns);
    if (launch->limit == NULL)
        return -1;
    launch->queued_ns = now_ns();
    launch->state = RUNS;
    int error = driver->push_context(session->context); /* the caller's thread can have another one */
    if (error != 0)
        return error;
    if (num_first > 0)
        error = queue_wait(state, launch, HALF_ENDED);
    for (Py_ssize_t i = 0; error == 0 && i <= launch->num_kernels; i++) {
        if (i == num_first)
            error = queue_wait(state, launch, ENDED);
        if (error == 0 && i < launch->num_kernels)
            error = queue_kernel(state, launch, launch->kernels + i);
    }
    if (error == 0)
        error = driver->copy_to_host(launch->cell, launch->sum, sizeof *launch->cell, launch->stream);
    if (error == 0)
        error = driver->write(launch->stream, (uint64_t)(uintptr_t)(launch->cell + 1), number, WRITE_AFTER_ALL_BEFORE);
    void *context;
    int pop_error = driver->pop_context(&context);
    return error != 0 ? error : pop_error;
}

static Launch *armed(State *state, const Session *session, uint64_t grant) {
    for (Launch *launch = state->launches; launch != NULL; launch = launch->next)
        if (launch->state == ARMED && launch->session == session && launch->grant == grant)
            return launch;
    return NULL;
}

/* Whether one scatter runs, and no other piece is expected. The owner still counts a scatter that it has not taken as expected. */
static int is_lone(const State *state) {
    int num_running = 0, num_expected = 0;
    for (const Launch *launch = state->launches; launch != NULL; launch = launch->next) {
        num_running += launch->state == RUNS;
        num_expected -= launch->state != ARMED && !launch->is_taken;
    }
    for (const Session *session = state->sessions; session != NULL; session = session->next)
        num_expected += session->num_awaited;
    return num_running == 1 && num_expected <= 0;
}

/* Take the entries of the gathers that have begun. Returns whether there are any. If the writer skips an entry, signals are stopped:
 * otherwise each look would find news. */
static int take_entries(State *state, Session *session) {
    int has_news = 0;
    while (is_watched(session) && !is_full(session)) {
        uint64_t number = session->num_taken + 1, *entry = entry_of(session, number);
        uint64_t begun = load(entry + BEGUN), queued = load(entry + QUEUED);
        if (begun > number || queued > number) {
            session->is_distrusted = 1;
            stop_session(session);
            return 1;
        }
        if (begun != number)
            break;
        session->num_taken = number;
        has_news = 1;
        Launch *launch = armed(state, session, load(entry + GRANT));
        if (launch == NULL) {
            *status_of(session, number) = WAITS;
            session->num_waiting++;
            continue;
        }
        *status_of(session, number) = TAKEN;
        int error = queue_launch(state, launch, number);
        if (error != 0) {
            state->error = error;
            report(state);
        }
    }
    return has_news;
}

/* Report the gathers that have ended and have no scatter. */
static int end_gathers(State *state, Session *session) {
    int has_news = 0;
    for (uint64_t number = session->num_closed + 1; session->num_waiting > 0 && number <= session->num_taken; number++) {
        uint64_t *entry = entry_of(session, number);
        if (*status_of(session, number) != WAITS || load(entry + ENDED) != number)
            continue;
        Gathered *found = malloc(sizeof *found);
        if (found == NULL)
            break; /* the next look tries again */
        *found = (Gathered){.session = session->number, .grant = load(entry + GRANT), .number = number,
                            .digest = load(entry + TOTAL) - load(entry + BASE)};
        *state->last_gathered = found;
        state->last_gathered = &found->next;
        *status_of(session, number) = TAKEN;
        session->num_waiting--;
        has_news = 1;
    }
    return has_news;
}

static int end_launches(State *state) {
    int has_news = 0;
    for (Launch *launch = state->launches; launch != NULL; launch = launch->next) {
        if (launch->state != RUNS)
            continue;
        if (launch->gathered_ns == 0 && load(launch->entry + ENDED) == launch->number)
            launch->gathered_ns = now_ns();
        if (launch->gathered_ns == 0 && !launch->is_reported && now_ns() - launch->queued_ns > LONG_GATHER_NS) {
            launch->is_reported = 1;
            has_news |= is_lone(state); /* so that the owner handles the start meanwhile */
        }
        if (load(launch->cell + 1) != launch->number)
            continue;
        launch->ended_ns = now_ns();
        launch->is_given_up = end_limit(launch->limit);
        launch->limit = NULL;
        launch->found = load(launch->cell);
        launch->announced = load(launch->entry + TOTAL) - load(launch->entry + BASE);
        launch->state = DONE;
        has_news = 1;
    }
    return has_news;
}

/* Returns the longest pause before the next look; 0 if there is nothing to look at. */
static int64_t most_pause_ns(State *state) {
    int64_t most = 0;
    int num_awaited = 0;
    for (const Session *session = state->sessions; session != NULL; session = session->next)
        num_awaited += session->num_awaited;
    for (const Launch *launch = state->launches; launch != NULL; launch = launch->next)
        if (launch->state == RUNS)
            return RUNNING_PAUSE_NS;
    int64_t near = num_awaited <= FEW ? RUNNING_PAUSE_NS : NEAR_PAUSE_NS, now = now_ns();
    for (Session *session = state->sessions; session != NULL; session = session->next) {
        if (most == 0 && session->num_waiting > 0)
            most = FAR_PAUSE_NS;
        if (!is_watched(session) || is_full(session))
            continue;
        int64_t pause = FAR_PAUSE_NS;
        /* The next gather is queued, so it waits at most for a step of the engine. A grant can wait far longer. */
        uint64_t number = session->num_taken + 1;
        if (load(entry_of(session, number) + QUEUED) == number) {
            if (session->num_queued != number) {
                session->num_queued = number;
                session->queued_ns = now;
            }
            int64_t late = (now - session->queued_ns) / LATE_SHARE;
            pause = late < near ? near : late < FAR_PAUSE_NS ? late : FAR_PAUSE_NS;
        }
        if (most == 0 || pause < most)
            most = pause;
    }
    return most;
}

static int is_near(int64_t most_pause) { return most_pause != 0 && most_pause < FAR_PAUSE_NS; }

/* Look at all words. The caller holds the gate. Returns the pause before the next look, and its maximum in `most_ns`: 0 if there is nothing
 * to look at. */
static int64_t look(State *state, int64_t *most_ns) {
    int has_reports = 0, has_news = state->has_news;
    state->has_news = 0;
    for (Session *session = state->sessions; session != NULL; session = session->next) {
        has_news |= take_entries(state, session);
        has_reports |= end_gathers(state, session);
    }
    has_reports |= end_launches(state);
    if (has_reports)
        report(state);
    int64_t most = most_pause_ns(state), now = now_ns();
    if (has_news || has_reports)
        state->news_ns = now;
    *most_ns = most;
    int64_t pause = (now - state->news_ns) / PAUSE_SHARE;
    return pause > most ? most : pause < LEAST_PAUSE_NS ? LEAST_PAUSE_NS : pause;
}

static void *keep_looking(void *argument) {
    State *state = argument;
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0); /* of this thread: the default is 50 us */
    pthread_mutex_lock(&state->gate);
    state->news_ns = now_ns();
    int64_t most = 0;
    while (!state->is_closing) {
        int was_near = is_near(most);
        int64_t pause = look(state, &most);
        if (most == 0) {
            pthread_cond_wait(&state->changed, &state->gate);
            continue;
        }
        if (state->is_polled)
            pause = SPARE_PAUSE_NS;
        else if (is_near(most) && state->has_polled && (!was_near || __atomic_exchange_n(&state->wants_poll, 0, __ATOMIC_RELAXED)))
            report(state); /* so that the loop polls */
        pthread_mutex_unlock(&state->gate);
        nanosleep(&(struct timespec){.tv_sec = 0, .tv_nsec = pause}, NULL);
        pthread_mutex_lock(&state->gate);
    }
    pthread_mutex_unlock(&state->gate);
    return NULL;
}

/* Methods. The thread can be in a call of CUDA while it holds the gate, so no method waits for the gate while it holds the GIL. */

static State *enter(PyObject *self) {
    State *state = ((Watch *)self)->state;
    if (pthread_mutex_trylock(&state->gate) != 0) {
        Py_BEGIN_ALLOW_THREADS
        pthread_mutex_lock(&state->gate);
        Py_END_ALLOW_THREADS
    }
    return state;
}

static PyObject *leave(State *state) {
    pthread_mutex_unlock(&state->gate);
    Py_RETURN_NONE;
}

static void tell(State *state) {
    state->has_news = 1;
    pthread_cond_signal(&state->changed);
}

static Session *session_of(State *state, uint64_t number) {
    for (Session *session = state->sessions; session != NULL; session = session->next)
        if (session->number == number)
            return session;
    return NULL;
}

static void free_launch(Launch *launch) {
    for (Py_ssize_t i = 0; i < launch->num_kernels; i++)
        free(launch->kernels[i].parameters);
    free(launch);
}

static PyObject *method_enter(PyObject *self, PyObject *Py_UNUSED(unused)) {
    enter(self);
    Py_RETURN_NONE;
}

static PyObject *method_exit(PyObject *self, PyObject *Py_UNUSED(arguments)) { return leave(((Watch *)self)->state); }

static PyObject *method_add(PyObject *self, PyObject *arguments) {
    unsigned long long number, words, device_words, context;
    if (!PyArg_ParseTuple(arguments, "KKKK", &number, &words, &device_words, &context))
        return NULL;
    Session *session = calloc(1, sizeof *session);
    if (session == NULL)
        return PyErr_NoMemory();
    session->number = number;
    session->words = (uint64_t *)(uintptr_t)words;
    session->device_words = device_words;
    session->context = (void *)(uintptr_t)context;
    State *state = enter(self);
    session->next = state->sessions;
    state->sessions = session;
    return leave(state);
}

static PyObject *method_remove(PyObject *self, PyObject *arguments) {
    unsigned long long number;
    if (!PyArg_ParseTuple(arguments, "K", &number))
        return NULL;
    State *state = enter(self);
    for (Session **place = &state->sessions; *place != NULL; place = &(*place)->next) {
        Session *session = *place;
        if (session->number != number)
            continue;
        for (Launch *launch = state->launches; launch != NULL; launch = launch->next)
            if (launch->session == session)
                launch->session = NULL;
        *place = session->next;
        free(session);
        break;
    }
    return leave(state);
}

static PyObject *method_expect(PyObject *self, PyObject *arguments) {
    unsigned long long number;
    int change;
    if (!PyArg_ParseTuple(arguments, "Ki", &number, &change))
        return NULL;
    State *state = enter(self);
    Session *session = session_of(state, number);
    if (session != NULL) {
        session->num_awaited += change;
        if (change > 0)
            tell(state);
    }
    return leave(state);
}

static PyObject *method_stop(PyObject *self, PyObject *arguments) {
    unsigned long long number;
    if (!PyArg_ParseTuple(arguments, "K", &number))
        return NULL;
    State *state = enter(self);
    Session *session = session_of(state, number);
    int was_running = session != NULL && !session->is_stopped;
    if (was_running)
        stop_session(session);
    leave(state);
    return PyBool_FromLong(was_running);
}

static PyObject *method_resume(PyObject *self, PyObject *arguments) {
    unsigned long long number;
    if (!PyArg_ParseTuple(arguments, "K", &number))
        return NULL;
    State *state = enter(self);
    Session *session = session_of(state, number);
    if (session != NULL && !session->is_distrusted) {
        store(session->words + IS_STOPPED, 0);
        session->is_stopped = 0;
        tell(state);
    }
    return leave(state);
}

static PyObject *method_arm(PyObject *self, PyObject *arguments) {
    unsigned long long session_number, grant, stream, sum, cell;
    PyObject *kernels;
    Py_ssize_t num_first;
    if (!PyArg_ParseTuple(arguments, "KKKKKO!n", &session_number, &grant, &stream, &sum, &cell, &PyTuple_Type, &kernels, &num_first))
        return NULL;
    Py_ssize_t count = PyTuple_Size(kernels);
    Launch *launch = calloc(1, sizeof *launch + (size_t)count * sizeof *launch->kernels);
    if (launch == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        Kernel *kernel = launch->kernels + i;
        unsigned long long function;
        const char *parameters;
        Py_ssize_t num_bytes;
        if (!PyArg_ParseTuple(PyTuple_GetItem(kernels, i), "KIIIIy#", &function, &kernel->grid_x, &kernel->grid_y, &kernel->threads,
                              &kernel->shared_bytes, &parameters, &num_bytes)) {
            free_launch(launch);
            return NULL;
        }
        launch->num_kernels = i + 1;
        kernel->function = (void *)(uintptr_t)function;
        kernel->num_bytes = (size_t)num_bytes;
        kernel->parameters = malloc((size_t)num_bytes + 1);
        if (kernel->parameters == NULL) {
            free_launch(launch);
            return PyErr_NoMemory();
        }
        memcpy(kernel->parameters, parameters, (size_t)num_bytes);
    }
    launch->num_first = num_first < count ? num_first : count;
    launch->grant = grant;
    launch->stream = (void *)(uintptr_t)stream;
    launch->sum = sum;
    launch->cell = (uint64_t *)(uintptr_t)cell;
    State *state = enter(self);
    launch->session = session_of(state, session_number);
    int has_session = launch->session != NULL;
    if (has_session) {
        launch->next = state->launches;
        state->launches = launch;
    } else {
        free_launch(launch);
    }
    leave(state);
    return PyBool_FromLong(has_session);
}

static PyObject *method_disarm(PyObject *self, PyObject *arguments) {
    unsigned long long grant;
    if (!PyArg_ParseTuple(arguments, "K", &grant))
        return NULL;
    State *state = enter(self);
    for (Launch **place = &state->launches; *place != NULL; place = &(*place)->next) {
        Launch *launch = *place;
        if (launch->state != ARMED || launch->grant != grant)
            continue;
        *place = launch->next;
        free_launch(launch);
        break;
    }
    return leave(state);
}

static int append(PyObject *list, PyObject *item) {
    int error = item == NULL || PyList_Append(list, item) != 0;
    Py_XDECREF(item);
    return error;
}

/* Whether a scatter is about to end, and nothing else is expected. */
static int is_near_end(const State *state, int64_t now) {
    if (!is_lone(state))
        return 0;
    for (const Launch *launch = state->launches; launch != NULL; launch = launch->next)
        if (launch->state == RUNS && launch->gathered_ns != 0 && now - launch->gathered_ns < MOST_SPIN_NS)
            return 1;
    return 0;
}

/* Look while news are near, until the descriptor is readable or the time is over. */
static void poll_until(State *state, int fd, int64_t ends_ns) {
    struct pollfd events = {.fd = fd, .events = POLLIN};
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0); /* of this thread: the default is 50 us */
    int is_ready = 0;
    pthread_mutex_lock(&state->gate);
    state->is_polled = 1;
    while (!is_ready && !state->is_closing) {
        int64_t most, pause = look(state, &most), now = now_ns();
        if (!is_near(most) || now >= ends_ns)
            break;
        if (is_near_end(state, now))
            pause = 0;
        else if (pause > ends_ns - now)
            pause = ends_ns - now;
        pthread_mutex_unlock(&state->gate);
        is_ready = ppoll(&events, 1, &(struct timespec){.tv_sec = 0, .tv_nsec = pause}, NULL) != 0;
        pthread_mutex_lock(&state->gate);
    }
    state->is_polled = 0;
    pthread_mutex_unlock(&state->gate);
    prctl(PR_SET_TIMERSLACK, 0, 0, 0, 0); /* the default again: new threads inherit the value */
}

static PyObject *method_poll(PyObject *self, PyObject *arguments) {
    int fd;
    PyObject *timeout;
    if (!PyArg_ParseTuple(arguments, "iO", &fd, &timeout))
        return NULL;
    double timeout_s = timeout == Py_None ? 1.0 : PyFloat_AsDouble(timeout);
    if (PyErr_Occurred())
        return NULL;
    State *state = ((Watch *)self)->state;
    if (pthread_mutex_trylock(&state->gate) != 0) { /* the thread looks, perhaps for as long as a stream waits */
        __atomic_store_n(&state->wants_poll, 1, __ATOMIC_RELAXED);
        Py_RETURN_FALSE;
    }
    state->has_polled = 1;
    int64_t most = most_pause_ns(state);
    pthread_mutex_unlock(&state->gate);
    if (!is_near(most) || timeout_s <= 0)
        Py_RETURN_FALSE;
    int64_t ends_ns = now_ns() + (int64_t)((timeout_s < 1.0 ? timeout_s : 1.0) * 1e9);
    Py_BEGIN_ALLOW_THREADS
    poll_until(state, fd, ends_ns);
    Py_END_ALLOW_THREADS
    Py_RETURN_TRUE;
}

static PyObject *method_take_queued(PyObject *self, PyObject *Py_UNUSED(unused)) {
    PyObject *queued = PyList_New(0);
    State *state = enter(self);
    for (Launch *launch = state->launches; queued != NULL && launch != NULL; launch = launch->next) {
        if (launch->state == ARMED || launch->is_taken)
            continue;
        launch->is_taken = 1;
        if (append(queued, PyLong_FromUnsignedLongLong(launch->grant)))
            Py_CLEAR(queued);
    }
    leave(state);
    return queued;
}

/* A report is removed even if there is no memory to return it: such an error ends the rank. */
static PyObject *method_take_ended(PyObject *self, PyObject *Py_UNUSED(unused)) {
    PyObject *scattered = PyList_New(0), *gathered = PyList_New(0), *found = NULL;
    uint64_t count;
    State *state = enter(self);
    if (scattered == NULL || gathered == NULL)
        goto end;
    state->has_reports = 0;
    if (read(state->event_fd, &count, sizeof count) < 0) {
        /* nothing was reported since the last call */
    }
    if (state->error != 0) {
        const char *format = state->error < 0 ? "the wait of a stream cannot be limited: no memory or no thread"
                                              : "a scatter cannot be queued: CUDA's driver returned error %d";
        PyErr_Format(PyExc_RuntimeError, format, state->error);
        state->error = 0;
        goto end;
    }
    for (Launch **place = &state->launches; *place != NULL;) {
        Launch *launch = *place;
        if (launch->state != DONE || !launch->is_taken) {
            place = &launch->next;
            continue;
        }
        int64_t begun_ns = launch->gathered_ns > launch->queued_ns ? launch->gathered_ns : launch->queued_ns;
        PyObject *is_intact = launch->is_given_up ? Py_NewRef(Py_None) : PyBool_FromLong(launch->found == launch->announced);
        int error = append(scattered, Py_BuildValue("(KNd)", (unsigned long long)launch->grant, is_intact,
                                                    (double)(launch->ended_ns - begun_ns) * 1e-9));
        if (launch->session != NULL)
            close_entry(launch->session, launch->number);
        *place = launch->next;
        free_launch(launch);
        if (error)
            goto end;
    }
    while (state->gathered != NULL) {
        Gathered *first = state->gathered;
        int error = append(gathered, Py_BuildValue("(KKK)", (unsigned long long)first->session, (unsigned long long)first->grant,
                                                   (unsigned long long)first->digest));
        Session *session = session_of(state, first->session);
        if (session != NULL)
            close_entry(session, first->number);
        state->gathered = first->next;
        if (state->gathered == NULL)
            state->last_gathered = &state->gathered;
        free(first);
        if (error)
            goto end;
    }
    found = Py_BuildValue("(OO)", scattered, gathered);
    if (found != NULL && PyList_Size(scattered) + PyList_Size(gathered) > 0)
        pthread_cond_signal(&state->changed); /* all entries can have been in use */
end:
    leave(state);
    Py_XDECREF(scattered);
    Py_XDECREF(gathered);
    return found;
}

static void free_sessions(State *state) {
    while (state->sessions != NULL) {
        Session *session = state->sessions;
        state->sessions = session->next;
        free(session);
    }
}

/* End the thread, and the waits of launches under way, which have no limit from then on. At the end of the process, the owner's thread can
 * use the watch meanwhile and afterwards, when the words are unmapped: so the sessions are forgotten. */
static void close_state(State *state) {
    if (state->pid != getpid()) /* a forked child has no such thread */
        return;
    pthread_mutex_lock(&state->gate);
    int has_thread = state->has_thread;
    state->has_thread = 0;
    state->is_closing = 1;
    pthread_cond_signal(&state->changed);
    pthread_mutex_unlock(&state->gate);
    if (has_thread)
        pthread_join(state->thread, NULL);
    pthread_mutex_lock(&state->gate);
    while (state->launches != NULL) {
        Launch *launch = state->launches;
        state->launches = launch->next;
        if (launch->limit != NULL) {
            end_wait(launch->limit);
            end_limit(launch->limit);
        }
        free_launch(launch);
    }
    free_sessions(state);
    pthread_mutex_unlock(&state->gate);
}

static PyObject *method_close(PyObject *self, PyObject *Py_UNUSED(unused)) {
    State *state = ((Watch *)self)->state;
    Py_BEGIN_ALLOW_THREADS
    close_state(state);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *method_has_reports(PyObject *self, PyObject *Py_UNUSED(unused)) {
    State *state = enter(self);
    int has_reports = state->has_reports;
    leave(state);
    return PyBool_FromLong(has_reports);
}

static PyObject *method_fileno(PyObject *self, PyObject *Py_UNUSED(unused)) { return PyLong_FromLong(((Watch *)self)->state->event_fd); }

static PyObject *watch_new(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(keywords)) {
    unsigned long long functions[6];
    double limit_s;
    if (!PyArg_ParseTuple(arguments, "(KKKKKK)d", functions, functions + 1, functions + 2, functions + 3, functions + 4, functions + 5,
                          &limit_s))
        return NULL;
    State *state = calloc(1, sizeof *state);
    if (state == NULL)
        return PyErr_NoMemory();
    pthread_mutexattr_t recursive;
    pthread_mutexattr_init(&recursive);
    pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&state->gate, &recursive);
    pthread_mutexattr_destroy(&recursive);
    init_condition(&state->changed);
    state->pid = getpid();
    state->limit_ns = (int64_t)(limit_s * 1e9);
    state->last_gathered = &state->gathered;
    _Static_assert(sizeof state->driver == sizeof functions, "the functions are pointers, in this order");
    memcpy(&state->driver, functions, sizeof functions);
    state->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int error = state->event_fd < 0 ? errno : start_thread(&state->thread, keep_looking, state);
    if (error != 0) {
        if (state->event_fd >= 0)
            close(state->event_fd);
        free(state);
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    state->has_thread = 1;
    PyObject *self = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) {
        close_state(state);
        close(state->event_fd);
        free(state);
        return NULL;
    }
    ((Watch *)self)->state = state;
    return self;
}

static void watch_dealloc(PyObject *self) {
    State *state = ((Watch *)self)->state;
    PyTypeObject *type = Py_TYPE(self);
    Py_BEGIN_ALLOW_THREADS
    close_state(state);
    Py_END_ALLOW_THREADS
    while (state->gathered != NULL) {
        Gathered *first = state->gathered;
        state->gathered = first->next;
        free(first);
    }
    free_sessions(state);
    close(state->event_fd);
    free(state);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Arguments and results are in _signals.pyi. */
static PyMethodDef watch_methods[] = {
    {"__enter__", method_enter, METH_NOARGS, NULL},
    {"__exit__", method_exit, METH_VARARGS, NULL},
    {"add", method_add, METH_VARARGS, NULL},
    {"arm", method_arm, METH_VARARGS, NULL},
    {"close", method_close, METH_NOARGS, NULL},
    {"disarm", method_disarm, METH_VARARGS, NULL},
    {"expect", method_expect, METH_VARARGS, NULL},
    {"fileno", method_fileno, METH_NOARGS, NULL},
    {"has_reports", method_has_reports, METH_NOARGS, NULL},
    {"poll", method_poll, METH_VARARGS, NULL},
    {"remove", method_remove, METH_VARARGS, NULL},
    {"resume", method_resume, METH_VARARGS, NULL},
    {"stop", method_stop, METH_VARARGS, NULL},
    {"take_ended", method_take_ended, METH_NOARGS, NULL},
    {"take_queued", method_take_queued, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot watch_slots[] = {
    {Py_tp_new, watch_new},
    {Py_tp_dealloc, watch_dealloc},
    {Py_tp_methods, watch_methods},
    {0, NULL},
};

static PyType_Spec watch_spec = {
    .name = "transfer.receive._signals.Watch",
    .basicsize = sizeof(Watch),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = watch_slots,
};

static PyObject *source_hash(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) { return PyUnicode_FromString(SOURCE_HASH); }

static PyMethodDef functions[] = {
    {"source_hash", source_hash, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int add_types(PyObject *module) {
    PyObject *type = PyType_FromSpec(&watch_spec);
    int error = type == NULL ? -1 : PyModule_AddObjectRef(module, "Watch", type);
    Py_XDECREF(type);
    return error;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, add_types},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_signals", .m_size = 0, .m_methods = functions, .m_slots = slots};

PyMODINIT_FUNC PyInit__signals(void) { return PyModuleDef_Init(&definition); }
