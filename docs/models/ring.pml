/* The ring: grants ahead of what may be written, acks, staging slots, selective release, quarantine (docs/protocol.md, ADR 0001, 0004, 0010).
 *
 * For a reader who never saw Promela. A `proctype` is a process; all processes run interleaved in every possible order, and spin visits
 * every state that any order can reach. `guard -> step` waits until the guard holds. `if` and `do` take any one of their options (::)
 * whose guard holds; `do` goes on until `break`. `atomic` and `d_step` are one step of which nobody sees the middle. `assert` is what
 * spin proves: it never fails in any order. A state in which nothing can go on, and not every process is at its end, is an error too.
 * `inline` is a macro. A process has no priority and no speed: what can be delayed is delayed for ever in some run.
 *
 * What is modelled. One decode rank's ring of CAP cells (a cell is 256 bytes); two writers; PIECES pieces, all of which are granted,
 * each of 1 to MAX_CELLS cells. Positions grow and are bits of a word: bit n is set when position n is released. A writer asks for a
 * grant when fewer than AHEAD of its grants are unreleased. `StagingAllocator.assign` places grants with padding at the ring's end,
 * and around quarantined bytes. A piece begins when its grant may be written by what its writer has heard, and a slot is free; any
 * writable piece of a writer may be the next, for engines compute in any order. A piece can be given up by the decode rank at any
 * moment: quarantine, until its writer has drained. A slot is free again when the write ends. Acks are late, lost, repeated, reordered;
 * with ONE_RANGE there is room for one released range above the watermark, and the ranges take turns. Pieces in STILL are granted and
 * never written, because their writer stands still: the pieces of the other writer end all the same.
 *
 * What is left out, and why nothing is lost by it.
 *  - Messages between grant and release (transfer.pml has them, with all their losses). Here a grant is heard at once, and so are
 *    `ChunkReady`, abort and drained: a message that is late is a process that goes on late, which spin tries anyway.
 *  - Sizes are not cut from prompts: any sequence of sizes is tried, so those of every request are.
 *  - One writer's pieces are asked for in order. They may belong to one request or to several: what differs is in transfer.pml.
 *  - The search for released bytes is not `_blocker_of`, which skips whole rounds, but its definition: every earlier position on the
 *    same bytes is released. That the two agree is tested against an oracle in tests/unit/test_ring.py.
 *  - Gather and write are one step of some length; a direct session differs from it by having no slots (SLOTS at PIECES).
 */

#ifndef CAP
#define CAP 3
#endif
#ifndef PIECES
#define PIECES 5
#endif
#ifndef OF_FIRST
#define OF_FIRST 3      /* pieces of the first writer; the others are the second's */
#endif
#ifndef MAX_CELLS
#define MAX_CELLS 2
#endif
#ifndef SLOTS
#define SLOTS 1         /* staging slots of each writer */
#endif
#ifndef AHEAD
#define AHEAD 3
#endif
#ifndef MAX_ABORTS
#define MAX_ABORTS 1
#endif

#ifndef STILL
#define STILL 0         /* pieces, as bits, whose writer stands still: they are granted, and nothing more comes of them */
#endif

#define IS_STILL(p)     ((STILL >> (p)) & 1)
#define MOVING          (PIECES - IS_STILL(0) - IS_STILL(1) - IS_STILL(2) - IS_STILL(3) - IS_STILL(4))
#define WRITER(p)       (p >= OF_FIRST)                 /* 0 or 1 */
#define IS_NEXT(p)      (asked[WRITER(p)] == (p) - WRITER(p) * OF_FIRST)
#define CELLS(p)        (((1 << size[p]) - 1) << begin[p])   /* the positions of a grant, as bits */
#define HAS(mask, bits) (((bits) & ~(mask)) == 0)
#define NONE            255

/* The ring, as the decode rank knows it. */
int released;                   /* bit n: position n is released */
byte head;                      /* the next grant begins here, padding aside */
byte begin[PIECES], size[PIECES];
bool granted[PIECES], quarantined[PIECES];
int before[PIECES];             /* the earlier positions on the bytes of a grant */
byte num_freed;
byte aborts_left;

/* What each writer has heard, and what it has under way. */
int view[2];                    /* released positions, as heard */
byte asked[2], outstanding[2], slots[2];
int late[2];                    /* an ack that is under way for long */

/* Between the two. */
bool ready[PIECES], given_up[PIECES], drained[PIECES];
byte num_ended;                 /* pieces that their writer has done with */

/* The memory itself: whose write is in it, or was and has not been scattered. This is what R1 is about. */
byte user[CAP];

byte i, at, plain, blocker, n;  /* of the steps below; NONE or 0 in between, so that they tell no two states apart */

/* Offsets of a quarantined grant and of n cells at position `at` meet. */
#define MEETS(q) (quarantined[q] && begin[q] % CAP < at % CAP + n && at % CAP < begin[q] % CAP + size[q])

inline find_blocker() {
	blocker = NONE; i = 0;
	do
	:: i < PIECES && MEETS(i) -> blocker = i; break
	:: i < PIECES && !MEETS(i) -> i++
	:: i == PIECES -> break
	od
}

/* StagingAllocator.assign and _place: not across the ring's end, around quarantined bytes while there is a way. */
inline assign(p) {
	n = size[p];
	at = head;
#ifndef BUG_WRAPPED_GRANT
	if
	:: at % CAP + n > CAP -> at = at + CAP - at % CAP
	:: else
	fi;
#endif
	plain = at;
	do
	:: at >= plain + 2 * CAP -> at = plain; break    /* no way around: the grant waits */
	:: at < plain + 2 * CAP ->
		if
		:: at % CAP + n > CAP -> at = at + CAP - at % CAP
		:: else ->
			find_blocker();
			if
			:: blocker == NONE -> break
			:: else -> at = at + begin[blocker] % CAP + size[blocker] - at % CAP
			fi
		fi
	od;
	released = released | (((1 << (at - head)) - 1) << head);       /* padding: consumed, and free at once */
	begin[p] = at;
	head = at + n;
	assert(head < 31);      /* positions are bits of a word here; a larger model needs another one */
	before[p] = 0; i = 0;
	do
	:: i < at ->
		if
		:: i % CAP >= at % CAP && i % CAP < at % CAP + n -> before[p] = before[p] | (1 << i)
		:: else
		fi;
		i++
	:: i == at -> break
	od;
	granted[p] = true;
	i = 0; at = 0; plain = 0; blocker = 0; n = 0
}

/* Rules R4 and, for the bytes that are taken over, R1: nobody has written into them meanwhile. */
inline release(p) {
	assert(granted[p] && (released & CELLS(p)) == 0);               /* R4: released exactly once */
	released = released | CELLS(p);
#ifdef BUG_RANGE_LOST
	/* The ring forgets a range that it has joined to nothing. */
	if
	:: (released & (1 << (begin[p] - 1))) == 0 && begin[p] > 0 && (released >> (begin[p] + size[p])) == 0 -> released = released & ~CELLS(p)
	:: else
	fi;
#endif
	quarantined[p] = false; granted[p] = false; ready[p] = false;
	outstanding[WRITER(p)]--;
	num_freed++
}

inline take_bytes(p) {
	i = 0;
	do
	:: i < size[p] ->
		assert((begin[p] + i) % CAP == begin[p] % CAP + i);     /* R6: the write stays in the ring */
		assert(user[(begin[p] + i) % CAP] == NONE);             /* R1: nobody else's bytes */
		user[(begin[p] + i) % CAP] = p;
		i++
	:: i == size[p] -> break
	od;
	i = 0
}

inline leave_bytes(p) {
	i = 0;
	do
	:: i < size[p] ->
		assert(user[(begin[p] + i) % CAP] == p);                /* R1: still ours */
		user[(begin[p] + i) % CAP] = NONE;
		i++
	:: i == size[p] -> break
	od;
	i = 0
}

/* RingView.is_writable: every earlier position on the same bytes is heard to be released. */
#ifdef BUG_TOTAL_ONLY
#define UNHEARD(p)      (((1 << begin[p]) - 1) & ~view[WRITER(p)])
#define BIT(x, k)       (((x) >> (k)) & 1)
#define COUNT(x)        (BIT(x,0)+BIT(x,1)+BIT(x,2)+BIT(x,3)+BIT(x,4)+BIT(x,5)+BIT(x,6)+BIT(x,7)+BIT(x,8)+BIT(x,9)+BIT(x,10)+BIT(x,11)+BIT(x,12)+BIT(x,13)+BIT(x,14)+BIT(x,15))
#define IS_WRITABLE(p)  (COUNT(UNHEARD(p)) + size[p] <= CAP)    /* as many bytes are free, but perhaps not these */
#else
#define IS_WRITABLE(p)  HAS(view[WRITER(p)], before[p])
#endif

/* What nobody looks at again is set to 0, so that it tells no two states apart. */
#define forget(p)       begin[p] = 0; size[p] = 0; before[p] = 0; given_up[p] = false; drained[p] = false; num_ended++

/* A piece at its writer: asked for, granted, begun, written, heard to be released. */
proctype Piece(byte p) {
	atomic {
		IS_NEXT(p) && outstanding[WRITER(p)] < AHEAD ->
		asked[WRITER(p)]++;
		outstanding[WRITER(p)]++;
		size[p] = 1;
		do
		:: size[p] < MAX_CELLS -> size[p]++
		:: break
		od;
		d_step { assign(p) }
	}
	if
	:: IS_STILL(p)
	:: d_step { !IS_STILL(p) && !given_up[p] && slots[WRITER(p)] > 0 && IS_WRITABLE(p) ->      /* rule 2, ADR 0010 */
			slots[WRITER(p)]--; take_bytes(p) };
		if
		:: d_step { !given_up[p] -> slots[WRITER(p)]++; ready[p] = true };      /* written: ChunkReady */
			if
			:: d_step { HAS(view[WRITER(p)], CELLS(p)) -> forget(p) }
			:: d_step { given_up[p] -> leave_bytes(p); drained[p] = true }
			fi
		:: d_step { given_up[p] -> slots[WRITER(p)]++; leave_bytes(p); drained[p] = true }      /* it settles all the same */
		fi
	:: d_step { given_up[p] -> drained[p] = true }                  /* never written: WriterDrained */
	fi
}

/* A granted piece at the decode rank. */
proctype Target(byte p) {
	granted[p];
	if
	:: ready[p] -> d_step { leave_bytes(p); release(p) }            /* scattered, its event fired */
	:: d_step { aborts_left > 0 -> aborts_left--; given_up[p] = true; quarantined[p] = true;
#ifdef BUG_NO_DRAIN
			release(p)
#endif
		};
#ifndef BUG_NO_DRAIN
		d_step { drained[p] -> release(p); forget(p) }          /* on proof, and never by elapsed time */
#endif
#ifdef BUG_TIMEOUT
	:: d_step { !ready[p] -> given_up[p] = true; release(p) }       /* it has waited for long */
#endif
	fi
}

/* Acks to one writer. The newest may arrive at any moment (a change, or a heartbeat that says it again), or a late one. What nobody
 * hears is lost; the same one twice changes nothing. Sequence numbers order acks as what they say is released does. */
#define PREFIX(r)       ((r) & ~((r) + 1))                      /* all below the watermark's position */
#define ABOVE(r)        ((r) & ~PREFIX(r))
#define LOWEST(x)       ((x) & ~((x) + ((x) & -(x))))           /* the lowest of the ranges in x */
#define SECOND(x)       LOWEST((x) & ~LOWEST(x))
#define THIRD(x)        LOWEST((x) & ~LOWEST(x) & ~SECOND(x))

inline hear(w, said) {
	assert(PREFIX(said) >= PREFIX(view[w]));                        /* R2: the watermark never moves back */
	view[w] = said
}

proctype Acks(byte w) {
end:	do
#ifdef ONE_RANGE
	:: d_step { !HAS(view[w], PREFIX(released) | LOWEST(ABOVE(released))) -> view[w] = view[w] | PREFIX(released) | LOWEST(ABOVE(released)) }
#ifndef BUG_LOWEST_RANGES_ONLY
	:: d_step { !HAS(view[w], SECOND(ABOVE(released))) -> view[w] = view[w] | PREFIX(released) | SECOND(ABOVE(released)) }
	:: d_step { !HAS(view[w], THIRD(ABOVE(released))) -> view[w] = view[w] | PREFIX(released) | THIRD(ABOVE(released)) }
#endif
#else
	:: d_step { view[w] != released -> hear(w, released) }
#ifdef LATE_ACKS
	:: d_step { late[w] != released -> late[w] = released }
#ifdef BUG_OLDER_ACK
	:: d_step { late[w] != view[w] -> hear(w, late[w]) }
#else
	:: d_step { late[w] != view[w] && HAS(late[w], view[w]) -> hear(w, late[w]) }   /* an older one is ignored */
#endif
#endif
#endif
	od
}

init {
	atomic {
		i = 0;
		do
		:: i < CAP -> user[i] = NONE; i++
		:: i == CAP -> break
		od;
		i = 0;
		slots[0] = SLOTS; slots[1] = SLOTS;
		aborts_left = 0;
		do
		:: aborts_left < MAX_ABORTS -> aborts_left++
		:: break
		od;
		i = 0;
		do
		:: i < PIECES && IS_STILL(i) -> run Piece(i); i++
		:: i < PIECES && !IS_STILL(i) -> run Piece(i); run Target(i); i++
		:: i == PIECES -> break
		od;
		i = 0;
		run Acks(0); run Acks(1)
	}
	d_step {
		num_ended == MOVING && num_freed == MOVING ->
		assert(STILL != 0 || released == (1 << head) - 1);      /* R5: after the last release the ring is empty */
		assert(slots[0] == SLOTS && slots[1] == SLOTS)
	}
}

ltl every_grant_is_released { <> (num_freed == PIECES) }
ltl every_piece_ends { <> (num_ended == PIECES) }
