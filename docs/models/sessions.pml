/* Sessions that are lost, processes that die or freeze, new incarnations: closed and over (docs/protocol.md, ADR 0018).
 *
 * How to read Promela is told at the head of ring.pml.
 *
 * What is modelled. One decode rank with a ring of CAP cells, in two lives at most: a crash takes the ring with it, and the next life
 * begins at position 0 again. Two prefill ranks; sessions 0 and 1 are theirs, and 2 is the successor of 0, opened once the decode rank has
 * closed that one, perhaps while its writer has not noticed. Each session has PER pieces of one cell. A write takes a while: it
 * begins, and it ends. A frozen writer is a process that does nothing for as long as it pleases: when it wakes, it goes on with what
 * it believes. The transport is one whose access only the writer can end (CUDA IPC, a mapped ring), or with REVOCABLE one where the
 * decode rank's close is the end. A lost session's grants stay in quarantine until it is over. Either end may notice first.
 *
 * What is left out, and why nothing is lost by it.
 *  - Aborts, attempts, declines: transfer.pml. A lost session fails its requests, which here is what its end does to its pieces.
 *  - How grants step around quarantined bytes: ring.pml. Here they do not, which only makes more of them meet.
 *  - Messages other than `ChunkReady` and acks: those of a session that is not open, or of another life, are dropped (rule 14), whatever
 *    they say. These two are kept because they would do the harm.
 *  - That a writer ever wakes: one that is frozen for ever holds its quarantine for ever, as is documented. The runs that are asked
 *    for an end are those in which its process goes on, or is killed.
 */

#ifndef CAP
#define CAP 1
#endif
#ifndef PER
#define PER 1                   /* pieces of a session */
#endif
#ifndef MAX_LOSSES
#define MAX_LOSSES 1            /* three missed heartbeats: of a session, at one of its ends */
#endif
#ifndef MAX_DEATHS
#define MAX_DEATHS 1            /* of prefill processes */
#endif
#ifndef MAX_CRASHES
#define MAX_CRASHES 1           /* of the decode process: 0 or 1 */
#endif

#define SESSIONS        3
#define PIECES          (SESSIONS * PER)
#define SESSION(p)      ((p) / PER)
#define NONE            255
#define AT(position)    (1 << (position))
#define HAS(mask, bits) (((bits) & ~(mask)) == 0)

/* The decode rank: its life, and the ring of that life. */
bool life;
byte head;
int released;
int last_words;                 /* the last ack of the life before: it may be under way for ever */

/* Sessions, at their two ends. */
bool opened[SESSIONS];          /* ever */
bool open_t[SESSIONS], open_w[SESSIONS];        /* at the target, at the writer */
bool life_of[SESSIONS];
bool ended[SESSIONS];           /* the writer's access has ended: no byte of it can land any more */
int view[SESSIONS];

bool granted[PIECES], ready[PIECES], writing[PIECES];
byte grant[PIECES];
int before[PIECES];             /* earlier positions on the same bytes */

byte user[CAP];                 /* of this life's memory: whose bytes these are (R1) */

byte losses_left, deaths_left, crashes_left;
byte i;

/* Whether a write of the session lands in this life's ring at all. R6: there is no other place where it could land. */
#ifdef REVOCABLE
#define LANDS(s)        (life_of[s] == life && open_t[s])
#define IS_OVER(s)      true
#else
#define LANDS(s)        (life_of[s] == life)
#ifdef BUG_TIMEOUT
#define IS_OVER(s)      true                    /* it has been closed for long */
#else
#define IS_OVER(s)      ended[s]
#endif
#endif

inline assign(p) {
	grant[p] = head; head++;
	before[p] = 0; i = 0;
	do
	:: i < grant[p] && i % CAP == grant[p] % CAP -> before[p] = before[p] | AT(i); i++
	:: i < grant[p] && i % CAP != grant[p] % CAP -> i++
	:: i == grant[p] -> break
	od;
	i = 0;
	granted[p] = true
}

inline release(p) {
	assert((released & AT(grant[p])) == 0);                         /* R4 */
	released = released | AT(grant[p]);
	if
	:: user[grant[p] % CAP] == p -> user[grant[p] % CAP] = NONE
	:: else
	fi
}

inline begin_write(p) {
	writing[p] = true;
	if
	:: LANDS(SESSION(p)) -> assert(user[grant[p] % CAP] == NONE); user[grant[p] % CAP] = p          /* R1 */
	:: else
	fi
}

inline end_write(p) {
	writing[p] = false;
	ready[p] = open_w[SESSION(p)];                                  /* ChunkReady, while the session is open */
	if
	:: LANDS(SESSION(p)) -> assert(user[grant[p] % CAP] == p)    /* R6: not into bytes that were granted to another */
	:: else
	fi
}

/* A piece at its writer. What is not begun when the session is closed is never begun. */
proctype Writer(byte p) {
end:	granted[p];
	if
	:: d_step { open_w[SESSION(p)] && HAS(view[SESSION(p)], before[p]) -> begin_write(p) };
		if
		:: d_step { writing[p] -> end_write(p) }                /* also when the session was closed meanwhile */
		:: !writing[p]                                          /* its process died */
		fi;
		(view[SESSION(p)] & AT(grant[p])) != 0 || !open_w[SESSION(p)]
	:: !open_w[SESSION(p)]
	fi
}

/* A piece at the decode rank. */
proctype Target(byte p) {
end:	d_step { open_t[SESSION(p)] && open_w[SESSION(p)] -> assign(p) };
	if
	:: d_step { ready[p] && open_t[SESSION(p)] ->
			assert(user[grant[p] % CAP] == p && !writing[p]);       /* what is scattered are its own bytes */
			release(p) }
	:: d_step { !open_t[SESSION(p)] && life_of[SESSION(p)] == life && IS_OVER(SESSION(p)) -> release(p) }   /* in quarantine until then */
	:: life_of[SESSION(p)] != life                                  /* its ring is gone */
#ifdef BUG_OTHER_LIFE
	:: d_step { p >= 2 * PER && open_t[SESSION(p)] && ready[p - 2 * PER] && life_of[SESSION(p - 2 * PER)] != life && grant[p - 2 * PER] == grant[p] ->
			assert(user[grant[p] % CAP] == p && !writing[p]);
			release(p) }
#endif
	fi
}

#if PER > 1
#define IS_WRITING(s)   (writing[(s) * PER] || writing[(s) * PER + 1])
#define stop_writes(s)  writing[(s) * PER] = false; writing[(s) * PER + 1] = false
#else
#define IS_WRITING(s)   writing[s]
#define stop_writes(s)  writing[s] = false
#endif

proctype Session(byte s) {
end:	do
	:: d_step { !opened[s] && (s < 2 || (opened[s - 2] && !open_t[s - 2])) ->
			opened[s] = true; open_t[s] = true; open_w[s] = true; life_of[s] = life;
			view[s] = released }                            /* rule 4: the current watermark at attach */
	:: d_step { open_t[s] && losses_left > 0 -> losses_left--; open_t[s] = false }
	:: d_step { open_w[s] && losses_left > 0 -> losses_left--; open_w[s] = false }
	:: d_step { open_w[s] && !open_t[s] -> open_w[s] = false }      /* the stream has ended */
	:: d_step { open_t[s] && !open_w[s] -> open_t[s] = false }
#ifdef BUG_ACCESS_ENDS_EARLY
	:: d_step { opened[s] && !open_w[s] && !ended[s] -> ended[s] = true }
#else
	:: d_step { opened[s] && !open_w[s] && !ended[s] && !IS_WRITING(s) -> ended[s] = true }         /* behind those under way */
#endif
	:: d_step { deaths_left > 0 && opened[s] && !ended[s] -> deaths_left--; open_w[s] = false; stop_writes(s); ended[s] = true }
	:: d_step { open_t[s] && open_w[s] && view[s] != released -> view[s] = released }
#ifdef BUG_OTHER_LIFE
	:: d_step { open_w[s] && life_of[s] && !HAS(view[s], last_words) -> view[s] = view[s] | last_words }
#endif
	od
}

/* The decode process dies, and another one takes its place. */
proctype Crash() {
end:	d_step { crashes_left > 0 ->
		crashes_left--;
		last_words = released;
		life = true; head = 0; released = 0;
		i = 0;
		do
		:: i < CAP -> user[i] = NONE; i++
		:: i == CAP -> break
		od;
		i = 0;
		do
		:: i < SESSIONS -> open_t[i] = false; i++
		:: i == SESSIONS -> break
		od;
		i = 0 }
}

init {
	atomic {
		i = 0;
		do
		:: i < CAP -> user[i] = NONE; i++
		:: i == CAP -> break
		od;
		i = 0;
		do
		:: losses_left < MAX_LOSSES -> losses_left++
		:: break
		od;
		do
		:: deaths_left < MAX_DEATHS -> deaths_left++
		:: break
		od;
		do
		:: crashes_left < MAX_CRASHES -> crashes_left++
		:: break
		od;
		do
		:: i < PIECES -> run Writer(i); run Target(i); i++
		:: i == PIECES -> break
		od;
		i = 0;
		do
		:: i < SESSIONS -> run Session(i); i++
		:: i == SESSIONS -> break
		od;
		i = 0;
		run Crash()
	}
}

/* R5: from some moment on the ring is empty, whatever happened. A piece that is granted and never released would be stuck, too. */
ltl every_grant_is_released { <> [] (released == (1 << head) - 1) }
