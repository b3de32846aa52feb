/* The heartbeats of one session, whose interval both ends agree on (docs/protocol.md, Liveness; ADR 0065).
 *
 * How to read Promela is told at the head of ring.pml.
 *
 * What is modelled. Two ends count steps; a step is one heartbeat of a session in use. Each end states an interval in every
 * heartbeat: 0 while it has a request in flight, which begins and ends at any step, otherwise a longer one. That of one end
 * changes, as with its number of sessions. Both ends apply the same rule to the last value of each end. A heartbeat takes up to
 * two steps, and those of one end stay in order. At any step, one end can freeze for ever.
 *
 * What is left out, and why nothing is lost by it.
 *  - Watermarks: they are heartbeats that come earlier than they must.
 *  - An earlier release: it states 0 always.
 *  - Processes that wake again: by then the session is over.
 */

#define OTHER(e)        (1 - (e))
#define SHORTEST        2               /* what an end states without a request: from this value to LONGEST */
#define LONGEST         3
#define MISSED          3
#define NONE            255

/* Steps after which the end of a frozen peer must be known: while a request is in flight here, and in any case. The other steps are
   heartbeats under way, and an interval that was shortened last. */
#define BOUND_IN_USE    (MISSED + 4)
#define BOUND           (MISSED * LONGEST + MISSED + 4)

bool in_use[2], frozen[2], knows[2];    /* `knows`: has declared the other end dead */
byte own[2], peer[2];                   /* the value stated last, and heard last */
byte silent[2], excused[2], unsent[2];  /* steps */
byte longest[2];                        /* interval since the last heartbeat of the other end */
byte older[2], newer[2];                /* heartbeats on the way to the end */
byte since[2], in_use_since[2];         /* steps since the peer froze, and of them those with a request in flight, without a break */
byte before, idle;                      /* `idle`: what the end whose step it is states without a request */
byte e;

#ifdef BUG_ALWAYS_EXCUSED
#define IS_DEAD(e)      (silent[e] - excused[e] > MISSED * INTERVAL(e))
#else
#define IS_DEAD(e)      (silent[e] - excused[e] > MISSED * INTERVAL(e) || silent[e] > MISSED * (longest[e] + 1))
#endif

#ifdef BUG_OWN_INTERVAL
#define INTERVAL(e)     (own[e] == 0 -> 1 : own[e])
#else
#define INTERVAL(e)     ((own[e] == 0 || peer[e] == 0) -> 1 : (own[e] > peer[e] -> own[e] : peer[e]))
#endif

inline hear(value) {
	if
	:: value != NONE -> peer[e] = value; silent[e] = 0; excused[e] = 0; longest[e] = INTERVAL(e)
	:: else
	fi;
	value = NONE
}

inline send() {
	before = INTERVAL(e);
	own[e] = (in_use[e] -> 0 : idle);
	unsent[e] = 0;
	if
#ifndef BUG_NOT_EXCUSED
	:: INTERVAL(e) < before -> excused[e] = silent[e]
#endif
	:: INTERVAL(e) > longest[e] -> longest[e] = INTERVAL(e)
	:: else
	fi;
	newer[OTHER(e)] = own[e];
	before = 0
}

inline step() {
	if
	:: in_use[e] = true
	:: in_use[e] = false
	fi;
	if
	:: idle = SHORTEST
	:: e == 1 -> idle = LONGEST
	fi;
	d_step {
		hear(older[e]);
		older[e] = newer[e];
		newer[e] = NONE
	};
	if
	:: d_step { older[e] != NONE -> hear(older[e]) }        /* a quick one */
	:: true
	fi;
	d_step {
		silent[e]++;
		unsent[e]++;
		if
		:: IS_DEAD(e) ->
			assert(frozen[OTHER(e)]);                       /* no living end is declared dead */
			knows[e] = true
		:: else ->
			if
			:: unsent[e] >= INTERVAL(e) || (in_use[e] && own[e] != 0) -> send()
			:: else
			fi
		fi;
		if
		:: frozen[OTHER(e)] && !knows[e] ->
			since[e]++;
			in_use_since[e] = (in_use[e] -> in_use_since[e] + 1 : 0);
			assert(since[e] <= BOUND);                      /* a frozen end is declared dead */
			assert(in_use_since[e] <= BOUND_IN_USE)
		:: else
		fi;
		idle = 0
	}
}

proctype Session() {
	d_step {
		older[0] = NONE; older[1] = NONE; newer[0] = NONE; newer[1] = NONE;
		longest[0] = 1; longest[1] = 1
	};
end:	do
	:: knows[0] || knows[1] -> break
	:: else ->
		if
		:: !frozen[0] && !frozen[1] ->
			if
			:: frozen[0] = true
			:: frozen[1] = true
			:: true
			fi
		:: else
		fi;
		e = 0;
		do
		:: e < 2 && !frozen[e] -> step(); e++
		:: e < 2 && frozen[e] -> e++
		:: e == 2 -> break
		od;
		e = 0
	od
}

init { run Session() }
