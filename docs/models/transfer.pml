/* A session: control messages that are lost, repeated and reordered; keys, attempts, declines; aborts from both sides (docs/protocol.md).
 *
 * How to read Promela is told at the head of ring.pml.
 *
 * What is modelled. `Sender` and `Receiver` of one session with PIECES pieces: the first OF_FIRST belong to request 0, the others to
 * request 1. Every piece is one cell, and the ring has CAP of them, so that grants wait for each other. Every message of docs/protocol.md
 * with what its receiver makes of it, also when it comes late, twice, out of order, or for a request that is over. The data plane is
 * two-sided (posted receives, keys, declines), or with ONE_SIDED writes land by themselves, or with DIRECT the gather is the write.
 * With SIGNALS, the first gather of a piece can also tell the receiver that it has begun, and the scatter waits for its end (ADR 0083).
 * The writer hears later that its gather has ended: the bytes can be scattered and released by then. The wait can be given up at any
 * moment.
 * Bytes break up to MAX_BROKEN times. Either side gives a request up at any moment, and its leader tells the other side at last.
 *
 * The network, in two forms.
 *  - For safety: what was ever sent can arrive at any later moment, any number of times, in any order, or never. That is every network
 *    that loses, repeats, delays and reorders; and what a side says again is then nothing new, so there are no ticks.
 *  - PATIENT, for liveness: a message arrives once, in any order; MAX_LOST are lost and MAX_REPEATED repeated; what the code says
 *    again at ticks is said again when nothing else can happen any more. A run without an end is then one in which repeating does
 *    not help, under every fairness, for nothing else was possible.
 *
 * What is left out, and why nothing is lost by it.
 *  - Windows, sizes, padding, stale acks, quarantine's effect on placement: ring.pml. Here a writer hears the newest ack at any moment.
 *  - A `GrantRequest` of several chunks is several of one: they are served in some order, and each order is tried. Refused whole, they are
 *    refused one after the other, and the first refusal fails the request.
 *  - Several routes: a request fails on all of its routes at once, through its rank or the leaders, as here through `Leaders`; what is
 *    said of a grant concerns one writer (ADR 0006).
 *  - A lost session: sessions.pml. Impossible messages of a hostile peer: tests/protocol/test_hostile_decode.py.
 *  - A digest that agrees by accident.
 */

#ifndef CAP
#define CAP 1
#endif
#ifndef PIECES
#define PIECES 2
#endif
#ifndef OF_FIRST
#define OF_FIRST 1
#endif
#ifndef SLOTS
#define SLOTS 1
#endif
#ifndef MAX_BROKEN
#define MAX_BROKEN 2            /* both attempts of one piece, or the first of two */
#endif
#ifndef MAX_CANCELS
#define MAX_CANCELS 1           /* by the decode side */
#endif
#ifndef MAX_ABORTS
#define MAX_ABORTS 1            /* by the prefill side */
#endif
#ifndef MAX_LOST
#define MAX_LOST 1
#endif
#ifndef MAX_REPEATED
#define MAX_REPEATED 1
#endif
#ifdef SIGNALS
#define DIRECT
#endif
#ifdef DIRECT
#define ONE_SIDED
#endif

#define REQUEST(p)      ((p) >= OF_FIRST)
#define REQUESTS        2
#define ATTEMPTS        2               /* transfer.ring.MAX_ATTEMPTS */
#define KEY(p, attempt) ((p) * ATTEMPTS + (attempt))
#define NONE            255
#define HAS(mask, bits) (((bits) & ~(mask)) == 0)

/* Stages of a piece at the sender, and at the receiver: the names of the code's. */
mtype:sender = { UNASKED, ASKED, GRANTED, GATHERING, WRITING, WRITTEN, RELEASED, DROPPED };
mtype:receiver = { T_NONE, T_GRANTED, T_SCATTERING, T_RELEASED };
mtype:bytes = { NOTHING, INTACT, BROKEN, DECLINED };

/* The control plane: one bit for every message there can be. */
int net;
#define GrantRequest(p)         (1 << (p))
#define GrantsIssued(p)         (1 << (PIECES + (p)))
#define ChunkReady(p, attempt)  (1 << (2 * PIECES + ATTEMPTS * (p) + (attempt)))
#define ChunkRejected(p)        (1 << (4 * PIECES + (p)))               /* of attempt 0: there is no third one */
#define GrantRefused(r)         (1 << (5 * PIECES + (r)))
#define AbortTransfer(r)        (1 << (5 * PIECES + REQUESTS + (r)))
#define WriterDrained(r)        (1 << (5 * PIECES + 2 * REQUESTS + (r)))
#define send(m)                 net = net | (m)
#define CAME(m)                 ((net & (m)) != 0)
#ifdef PATIENT
byte lost_left, repeated_left;
#define MESSAGE(m, act) \
	:: d_step { CAME(m) -> net = net & ~(m); act } \
	:: d_step { CAME(m) && lost_left > 0 -> lost_left--; net = net & ~(m) } \
	:: d_step { CAME(m) && repeated_left > 0 -> repeated_left--; act }
#else
#define MESSAGE(m, act)         :: d_step { CAME(m) -> act }
#endif

/* The sender. */
mtype:sender stage[PIECES];
byte grant[PIECES];                     /* its position, or NONE */
byte attempt[PIECES];
bool knows[REQUESTS], failed[REQUESTS]; /* request is there; was given up */
byte slots;
int view;                               /* positions that were heard to be released */
int spent;                              /* keys that were written or declined for requests that failed */

/* The receiver. */
mtype:receiver t_stage[PIECES];
byte t_grant[PIECES], t_attempt[PIECES];
mtype:bytes t_bytes[PIECES];            /* what the settled receive brought; one-sided: what lies there */
bool t_ready[PIECES];
#ifdef SIGNALS
bool has_landed[PIECES];                /* a gather has ended, and its writer has not heard of it */
bool t_signalled[PIECES];               /* the one signal has come */
bool t_waits[PIECES];                   /* the scatter waits for the end of the gather */
#endif
bool t_knows[REQUESTS], t_failed[REQUESTS], t_drained[REQUESTS];
int released;
byte head;

/* The data plane: keys that were posted, sent, and settled. */
int posted, sent, declined, settled;
byte user[CAP];                         /* R1: the piece whose receive or write is in these bytes, or whose bytes they are */

byte broken_left, cancels_left, aborts_left;
byte i, j, k;

/* Every earlier position on the same bytes is released. */
#define EARLIER(position)       (((position) >= CAP) * (1 << ((position) % CAP)) | ((position) >= 2 * CAP) * (1 << ((position) % CAP + CAP)) | \
				((position) >= 3 * CAP) * (1 << ((position) % CAP + 2 * CAP)))
#define IS_FREE(mask, position) HAS(mask, EARLIER(position))
#define AT(position)            (1 << (position))

/* ---- The data plane */

inline send_key(p, a, is_decline) {
	assert((sent & AT(KEY(p, a))) == 0);                            /* each key is sent once, as a write or as a decline */
	sent = sent | AT(KEY(p, a));
	if
	:: is_decline -> declined = declined | AT(KEY(p, a))
	:: else
	fi
}

inline land(p, what) {
	assert(user[grant[p] % CAP] == p);                              /* R1: it lands in bytes that are still its own */
	t_bytes[p] = what
}

inline take_bytes(p, position) {
	assert(user[position % CAP] == NONE || user[position % CAP] == p);      /* R1 */
	user[position % CAP] = p
}

/* ---- The sender */

inline decline(p, a) {
	if
	:: (spent & AT(KEY(p, a))) == 0 && (view & AT(grant[p])) == 0 -> spent = spent | AT(KEY(p, a)); send_key(p, a, true)
	:: else
	fi
}

inline start_write(p) {
	stage[p] = WRITING;
	send_key(p, attempt[p], false);
#ifdef ONE_SIDED
	take_bytes(p, grant[p])
#endif
}

/* A piece whose attempt is not written. The first attempt of a rejected piece was: its key must not be declined. */
inline give_up_piece(p) {
	stage[p] = DROPPED;
	if
	:: grant[p] != NONE ->
#ifndef BUG_SENT_KEY_FORGOTTEN
		if
		:: attempt[p] == 1 && (view & AT(grant[p])) == 0 -> spent = spent | AT(KEY(p, 0))
		:: else
		fi;
#endif
		decline(p, attempt[p])
	:: else
	fi
}

inline drop_written(p) {
	stage[p] = DROPPED;
	spent = spent | AT(KEY(p, 0)) | (attempt[p] == 1) * AT(KEY(p, 1));
	if
	:: (view & AT(grant[p])) != 0 -> spent = spent & ~(AT(KEY(p, 0)) | AT(KEY(p, 1)))
	:: else
	fi
}

#define IS_UNDER_WAY(p) (stage[p] == GATHERING || stage[p] == WRITING)

/* Rule 9: a failed request is over, and its writer drained, when nothing of it is under way. */
inline finish_failed(r) {
	k = 0;
	do
	:: k < PIECES && REQUEST(k) == r && IS_UNDER_WAY(k) -> break
	:: k < PIECES && !(REQUEST(k) == r && IS_UNDER_WAY(k)) -> k++
	:: k == PIECES -> knows[r] = false; send(WriterDrained(r)); break
	od;
	k = 0
}

inline fail(r) {
	if
	:: knows[r] && !failed[r] ->
		failed[r] = true;
		i = 0;
		do
		:: i < PIECES && REQUEST(i) == r ->
			if
			:: stage[i] == UNASKED || stage[i] == ASKED || stage[i] == GRANTED -> give_up_piece(i)
			:: stage[i] == WRITTEN -> drop_written(i)
			:: else
			fi;
			i++
		:: i < PIECES && REQUEST(i) != r -> i++
		:: i == PIECES -> break
		od;
		i = 0;
		finish_failed(r)
	:: else
	fi
}

inline released_at_sender(p) {
	stage[p] = RELEASED;
	k = 0;
	do
	:: k < PIECES && REQUEST(k) == REQUEST(p) && stage[k] != RELEASED -> break
	:: k < PIECES && !(REQUEST(k) == REQUEST(p) && stage[k] != RELEASED) -> k++
	:: k == PIECES -> knows[REQUEST(p)] = false; break              /* OutgoingSent */
	od;
	k = 0
}

inline on_grants_issued(p) {
	if
	:: !knows[REQUEST(p)] ->                                        /* asked for by a request that is over: give it back */
		grant[p] = t_grant[p];
		decline(p, 0);
		send(WriterDrained(REQUEST(p)))
	:: knows[REQUEST(p)] && stage[p] == ASKED && (view & AT(t_grant[p])) == 0 -> grant[p] = t_grant[p]; stage[p] = GRANTED
	:: knows[REQUEST(p)] && stage[p] == DROPPED && grant[p] == NONE -> grant[p] = t_grant[p]; decline(p, attempt[p])
	:: else -> assert(grant[p] == NONE || grant[p] == t_grant[p])   /* R3: what is said again is the same grant */
	fi
}

inline on_rejected(p) {
	if
	:: !knows[REQUEST(p)] || stage[p] == DROPPED -> decline(p, 1)
	:: knows[REQUEST(p)] && stage[p] == WRITTEN && attempt[p] == 0 ->
		attempt[p] = 1;
		stage[p] = GRANTED                                      /* waits for a slot, and is gathered again, from the pages */
	:: else
	fi
}

inline on_written(p) {
	slots++;
	if
	:: failed[REQUEST(p)] -> drop_written(p); finish_failed(REQUEST(p))
	:: else ->
		stage[p] = WRITTEN;
		send(ChunkReady(p, attempt[p]));
		if
		:: (view & AT(grant[p])) != 0 -> released_at_sender(p)
		:: else
		fi
	fi
}

inline hear() {
	view = released;
	i = 0;
	do
	:: i < PIECES ->
		if
		:: grant[i] != NONE && (view & AT(grant[i])) != 0 ->
			spent = spent & ~(AT(KEY(i, 0)) | AT(KEY(i, 1)));
			if
			:: stage[i] == WRITTEN && knows[REQUEST(i)] -> released_at_sender(i)
			:: else
			fi
		:: else
		fi;
		i++
	:: i == PIECES -> break
	od;
	i = 0
}

#ifdef BUG_NO_WATERMARK
#define MAY_WRITE(p)    true
#else
#define MAY_WRITE(p)    IS_FREE(view, grant[p])
#endif

proctype SenderPiece(byte p) {
end:	do
	:: d_step { knows[REQUEST(p)] && stage[p] == UNASKED -> stage[p] = ASKED; send(GrantRequest(p)) }
	:: d_step { stage[p] == GRANTED && slots > 0 && MAY_WRITE(p) ->
			slots--;
#ifdef DIRECT
			start_write(p)
#else
			stage[p] = GATHERING
#endif
		}
	:: d_step { stage[p] == GATHERING ->
			if
			:: failed[REQUEST(p)] -> slots++; give_up_piece(p); finish_failed(REQUEST(p))
			:: else -> start_write(p)
			fi }
#ifdef SIGNALS
	:: d_step { stage[p] == WRITING && !has_landed[p] -> land(p, INTACT); has_landed[p] = true }
	:: d_step { stage[p] == WRITING && !has_landed[p] && broken_left > 0 -> broken_left--; land(p, BROKEN); has_landed[p] = true }
	:: d_step { stage[p] == WRITING && has_landed[p] -> has_landed[p] = false; on_written(p) }
#else
#ifdef ONE_SIDED
	:: d_step { stage[p] == WRITING -> land(p, INTACT); on_written(p) }
	:: d_step { stage[p] == WRITING && broken_left > 0 -> broken_left--; land(p, BROKEN); on_written(p) }
#else
	:: d_step { stage[p] == WRITING -> on_written(p) }              /* perhaps buffered by the transport, and not received yet */
#endif
#endif
	MESSAGE(GrantsIssued(p), on_grants_issued(p))
	MESSAGE(ChunkRejected(p), on_rejected(p))
	od
}

#if PIECES > 2
#define HAS_ASKED(r)    ((REQUEST(0) == r && stage[0] == ASKED) || (REQUEST(1) == r && stage[1] == ASKED) || (REQUEST(2) == r && stage[2] == ASKED))
#else
#define HAS_ASKED(r)    ((REQUEST(0) == r && stage[0] == ASKED) || (REQUEST(1) == r && stage[1] == ASKED))
#endif

inline on_refused(r) {
	if
	:: knows[r] && HAS_ASKED(r) -> fail(r)
	:: else                                                         /* the answer to a repeated question */
	fi
}

inline on_abort(r) {
	if
	:: knows[r] ->
#ifdef BUG_DRAINED_TOO_EARLY
		send(WriterDrained(r));
#endif
		fail(r)                                                 /* says WriterDrained when nothing is under way */
	:: else -> send(WriterDrained(r))
	fi
}

proctype SenderRequest(byte r) {
end:	do
	MESSAGE(GrantRefused(r), on_refused(r))
	MESSAGE(AbortTransfer(r), on_abort(r))
	:: d_step { aborts_left > 0 && knows[r] -> aborts_left--; fail(r) }     /* OutgoingAborted */
	od
}

/* ---- The receiver */

inline release(p) {
	assert((released & AT(t_grant[p])) == 0);                       /* R4 */
	released = released | AT(t_grant[p]);
	t_stage[p] = T_RELEASED;
	if
	:: user[t_grant[p] % CAP] == p -> user[t_grant[p] % CAP] = NONE
	:: else
	fi
}

#ifdef BUG_NO_DRAIN
#define IS_DRAINED(r)   true
#else
#define IS_DRAINED(r)   t_drained[r]
#endif
#ifdef ONE_SIDED
#define IS_SETTLED(p)   true
#else
#define IS_SETTLED(p)   (t_bytes[p] != NOTHING)
#endif
#ifdef BUG_NO_SETTLE
#define IS_DEAD(p)      true
#else
#define IS_DEAD(p)      IS_SETTLED(p)
#endif

/* After a step of a request that was given up: release what is proven dead, forget it when nothing is left. */
inline settle(r) {
	j = 0;
	do
	:: j < PIECES ->
		if
		:: REQUEST(j) == r && t_stage[j] == T_GRANTED && IS_DRAINED(r) && IS_DEAD(j) -> release(j)
		:: else
		fi;
		j++
	:: j == PIECES -> break
	od;
	j = 0;
	do
	:: j < PIECES && REQUEST(j) == r && (t_stage[j] == T_GRANTED || t_stage[j] == T_SCATTERING) -> break
	:: j < PIECES && !(REQUEST(j) == r && (t_stage[j] == T_GRANTED || t_stage[j] == T_SCATTERING)) -> j++
	:: j == PIECES && t_drained[r] -> t_knows[r] = false; break
	:: j == PIECES && !t_drained[r] -> break
	od;
	j = 0
}

inline give_up(r) {
	if
	:: t_knows[r] && !t_failed[r] ->
		t_failed[r] = true;
		if
		:: !t_drained[r] -> send(AbortTransfer(r))
		:: else
		fi;
		settle(r)
	:: else
	fi
}

inline post(p) {
	assert((posted & AT(KEY(p, t_attempt[p]))) == 0);               /* each key is received once */
	posted = posted | AT(KEY(p, t_attempt[p]));
	take_bytes(p, t_grant[p])
}

inline on_broken(p) {
	t_ready[p] = false;
	if
	:: t_failed[REQUEST(p)] -> settle(REQUEST(p))
	:: !t_failed[REQUEST(p)] && t_attempt[p] == 1 -> give_up(REQUEST(p))    /* DATA_LOSS */
	:: !t_failed[REQUEST(p)] && t_attempt[p] == 0 ->
		t_attempt[p] = 1;
		t_bytes[p] = NOTHING;
		send(ChunkRejected(p));
#ifndef ONE_SIDED
		post(p)
#endif
	fi
}

inline scatter_if_here(p) {
	if
	:: t_ready[p] && IS_SETTLED(p) ->
		if
		:: t_bytes[p] == DECLINED -> on_broken(p)               /* 0 bytes came where more were said */
		:: else -> t_stage[p] = T_SCATTERING
		fi
	:: else
	fi
}

inline on_grant_request(p) {
	if
	:: !t_knows[REQUEST(p)] -> send(GrantRefused(REQUEST(p)))
	:: t_knows[REQUEST(p)] && t_failed[REQUEST(p)] && !t_drained[REQUEST(p)] -> send(AbortTransfer(REQUEST(p)))
	:: t_knows[REQUEST(p)] && t_failed[REQUEST(p)] && t_drained[REQUEST(p)] -> send(GrantRefused(REQUEST(p)))
	:: t_knows[REQUEST(p)] && !t_failed[REQUEST(p)] ->
		if
#ifdef BUG_GRANT_CHANGES
		:: t_stage[p] == T_GRANTED && head < 4 -> t_grant[p] = head; head++
#endif
		:: t_stage[p] == T_NONE -> t_stage[p] = T_GRANTED; t_grant[p] = head; head++
		:: else
		fi;
		send(GrantsIssued(p))
	fi
}

inline on_chunk_ready(p, a) {
	if
	:: t_knows[REQUEST(p)] && t_stage[p] == T_GRANTED && a < t_attempt[p] && !t_failed[REQUEST(p)] -> send(ChunkRejected(p))
	:: t_knows[REQUEST(p)] && t_stage[p] == T_GRANTED && a == t_attempt[p] && !t_ready[p] && !t_failed[REQUEST(p)] ->
		t_ready[p] = true;
		scatter_if_here(p)
	:: else                                                         /* rule 14: dropped and counted */
	fi
}

inline on_scattered(p) {
	if
	:: t_bytes[p] == BROKEN -> t_stage[p] = T_GRANTED; on_broken(p)
	:: else ->
		assert(t_bytes[p] == INTACT && user[t_grant[p] % CAP] == p);    /* R1: the bytes that were sent, and nobody else's */
		release(p);                                             /* rule 5: only now */
		if
		:: t_failed[REQUEST(p)] -> settle(REQUEST(p))
		:: else ->
			j = 0;
			do
			:: j < PIECES && REQUEST(j) == REQUEST(p) && t_stage[j] != T_RELEASED -> break
			:: j < PIECES && !(REQUEST(j) == REQUEST(p) && t_stage[j] != T_RELEASED) -> j++
			:: j == PIECES -> t_knows[REQUEST(p)] = false; break    /* IncomingComplete: the set is whole (rules 7 and 8) */
			od;
			j = 0
		fi
	fi
}

#ifdef SIGNALS
#ifdef BUG_SCATTER_BEFORE_END
#define HAS_ENDED(p)    true
#else
#define HAS_ENDED(p)    (t_bytes[p] != NOTHING)
#endif

inline on_signal(p) {
	t_signalled[p] = true;
	if
	:: t_knows[REQUEST(p)] && !t_failed[REQUEST(p)] && t_stage[p] == T_GRANTED && t_attempt[p] == 0 && !t_ready[p] ->
		t_waits[p] = true;
		t_stage[p] = T_SCATTERING
	:: else                                                         /* ChunkReady says the same */
	fi
}
#endif

/* A posted receive and what was sent under its key meet. */
#define MEET(p)         ((posted & sent & ~settled & AT(KEY(p, t_attempt[p]))) != 0)

inline on_settled(p, what) {
	settled = settled | AT(KEY(p, t_attempt[p]));
	t_bytes[p] = what;
	assert(t_bytes[p] == DECLINED || user[t_grant[p] % CAP] == p);  /* R1: it lands in bytes that are still its own */
	if
	:: t_stage[p] != T_GRANTED                                      /* released before: nobody asks any more */
	:: t_stage[p] == T_GRANTED && t_failed[REQUEST(p)] -> settle(REQUEST(p))
	:: t_stage[p] == T_GRANTED && !t_failed[REQUEST(p)] -> scatter_if_here(p)
	fi
}

proctype ReceiverPiece(byte p) {
end:	do
	MESSAGE(GrantRequest(p), on_grant_request(p))
	MESSAGE(ChunkReady(p, 0), on_chunk_ready(p, 0))
	MESSAGE(ChunkReady(p, 1), on_chunk_ready(p, 1))
#ifndef ONE_SIDED
#ifdef BUG_POSTED_EARLY
	:: d_step { t_stage[p] == T_GRANTED && (posted & AT(KEY(p, t_attempt[p]))) == 0 -> post(p) }
#else
	:: d_step { t_stage[p] == T_GRANTED && (posted & AT(KEY(p, t_attempt[p]))) == 0 && IS_FREE(released, t_grant[p]) -> post(p) }
#endif
	:: d_step { MEET(p) -> on_settled(p, ((declined & AT(KEY(p, t_attempt[p]))) != 0 -> DECLINED : INTACT)) }
	:: d_step { MEET(p) && (declined & AT(KEY(p, t_attempt[p]))) == 0 && broken_left > 0 -> broken_left--; on_settled(p, BROKEN) }
#endif
#ifdef SIGNALS
	:: d_step { HAS(sent & ~declined, AT(KEY(p, 0))) && !t_signalled[p] -> on_signal(p) }
	:: d_step { t_stage[p] == T_SCATTERING && (!t_waits[p] || HAS_ENDED(p)) -> t_waits[p] = false; on_scattered(p) }
	:: d_step { t_stage[p] == T_SCATTERING && t_waits[p] ->         /* given up, perhaps although the gather has just ended */
			t_waits[p] = false;
			t_stage[p] = T_GRANTED;
			if
			:: t_failed[REQUEST(p)] -> settle(REQUEST(p))
			:: else
			fi }
#else
	:: d_step { t_stage[p] == T_SCATTERING -> on_scattered(p) }
#endif
#ifdef BUG_TIMEOUT
	:: d_step { t_stage[p] == T_GRANTED && t_failed[REQUEST(p)] -> release(p); settle(REQUEST(p)) } /* it has been in quarantine for long */
#endif
	od
}

inline on_drained(r) {
	if
	:: t_knows[r] ->
		t_drained[r] = true;
		if
		:: t_failed[r] -> settle(r)
		:: else -> give_up(r)                                   /* the prefill rank gave the request up */
		fi
	:: else                                                         /* the answer to a repeated abort */
	fi
}

proctype ReceiverRequest(byte r) {
end:	do
	MESSAGE(WriterDrained(r), on_drained(r))
	:: d_step { cancels_left > 0 && t_knows[r] -> cancels_left--; give_up(r) }
	od
}

/* ---- What is between them */

/* A failure is told by rank, leader, leader, rank: on gRPC, which loses nothing, and takes its time. */
proctype Leaders(byte r) {
end:	do
	:: d_step { failed[r] && !knows[r] && t_knows[r] && !t_failed[r] -> give_up(r) }
	:: d_step { t_failed[r] && knows[r] && !failed[r] -> fail(r) }
	od
}

proctype Acks() {
end:	do
	:: d_step { view != released -> hear() }
	od
}

#ifdef ONE_SIDED
#define IS_MATCHED      true
#else
#define IS_MATCHED      (posted == sent && posted == settled)           /* no receive waits, no write, no decline */
#endif
#define IS_OVER         (!knows[0] && !knows[1] && !t_knows[0] && !t_knows[1])
#define IS_EMPTY        (released == (1 << head) - 1)
#define IS_QUIET        (IS_OVER && IS_EMPTY && IS_MATCHED && spent == 0 && slots == SLOTS)

#ifdef PATIENT
/* `timeout` holds when no process can do anything else. Both ends then say again what they have no answer to. */
proctype Ticks() {
end:	do
	:: d_step { timeout && !IS_QUIET ->
			i = 0;
			do
			:: i < PIECES ->
				if
				:: knows[REQUEST(i)] && stage[i] == ASKED -> send(GrantRequest(i))
				:: knows[REQUEST(i)] && stage[i] == WRITTEN -> send(ChunkReady(i, attempt[i]))
				:: else
				fi;
				if
				:: t_knows[REQUEST(i)] && t_failed[REQUEST(i)] && !t_drained[REQUEST(i)] -> send(AbortTransfer(REQUEST(i)))
#ifndef BUG_NOT_REMINDED
				:: t_knows[REQUEST(i)] && t_failed[REQUEST(i)] && t_drained[REQUEST(i)] && t_stage[i] == T_GRANTED && t_attempt[i] == 0 ->
					send(GrantsIssued(i))
				:: t_knows[REQUEST(i)] && t_failed[REQUEST(i)] && t_drained[REQUEST(i)] && t_stage[i] == T_GRANTED && t_attempt[i] == 1 ->
					send(ChunkRejected(i))
#endif
				:: else
				fi;
				i++
			:: i == PIECES -> break
			od;
			i = 0 }
	od
}
#endif

init {
	atomic {
		i = 0;
		do
		:: i < CAP -> user[i] = NONE; i++
		:: i == CAP -> break
		od;
		i = 0;
		slots = SLOTS;
		do
#ifdef PATIENT
		:: lost_left < MAX_LOST -> lost_left++
		:: break
		od;
		do
		:: repeated_left < MAX_REPEATED -> repeated_left++
		:: break
		od;
		do
#endif
		:: broken_left < MAX_BROKEN -> broken_left++
		:: break
		od;
		do
		:: cancels_left < MAX_CANCELS -> cancels_left++
		:: break
		od;
		do
		:: aborts_left < MAX_ABORTS -> aborts_left++
		:: break
		od;
		do
		:: i < PIECES ->
			stage[i] = UNASKED; grant[i] = NONE; t_stage[i] = T_NONE; t_grant[i] = NONE; t_bytes[i] = NOTHING;
			run SenderPiece(i); run ReceiverPiece(i);
			i++
		:: i == PIECES -> break
		od;
		i = 0;
		do
		:: i < REQUESTS ->
			knows[i] = true; t_knows[i] = true;
			run SenderRequest(i); run ReceiverRequest(i); run Leaders(i);
			i++
		:: i == REQUESTS -> break
		od;
		i = 0;
		run Acks();
#ifdef PATIENT
		run Ticks()
#endif
	}
}

#ifdef PATIENT
ltl everything_ends { <> IS_QUIET }
#endif
