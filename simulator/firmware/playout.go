package firmware

import (
	"slices"
	"time"
)

// playQueue is MAX_DECODE_PACKETS_IN_QUEUE (main/audio/audio_service.h:42): packets, whatever their duration.
const playQueue = 40

// playout is the loudspeaker: packets are played one after the other in real time; what arrives while playQueue of
// them wait is dropped. It works without timers, from the times at which it is asked. The zero value is silent. Not
// safe for concurrent use.
type playout struct {
	free    time.Time // when the last queued packet will have been played
	waiting []queuedPacket
}

type queuedPacket struct {
	start time.Time
	opus  []byte
}

// push queues a copy of a packet that plays for length; false means that the queue is full. Call begun first.
func (p *playout) push(now time.Time, opus []byte, length time.Duration) bool {
	if len(p.waiting) >= playQueue {
		return false
	}
	start := now
	if p.free.After(now) {
		start = p.free
	}
	p.free = start.Add(length)
	p.waiting = append(p.waiting, queuedPacket{start, slices.Clone(opus)})
	return true
}

// begun hands over the packets whose turn has come.
func (p *playout) begun(now time.Time, play func(opus []byte)) {
	n := 0
	for n < len(p.waiting) && !p.waiting[n].start.After(now) {
		play(p.waiting[n].opus)
		n++
	}
	p.waiting = slices.Delete(p.waiting, 0, n)
}

// reset throws away what waits and reports how much that was.
func (p *playout) reset() int {
	n := len(p.waiting)
	*p = playout{}
	return n
}

// left is how long the queue still plays.
func (p *playout) left(now time.Time) time.Duration { return max(0, p.free.Sub(now)) }

const (
	// keepSpoken bounds the memory of what a conversation has sent: about four minutes.
	keepSpoken = 4096
	// silenceReach is how far ahead a frame of silence is looked for: all of them are alike.
	silenceReach = 5
)

// echoCheck compares what a conversation receives with what it has sent. The zero value is ready. Not safe for concurrent
// use.
type echoCheck struct {
	sent    []uint64 // hashes of the packets, in order
	next    int      // where the next one is expected
	started bool     // speech has come back

	identical, lost, outOfOrder, foreign uint64
}

// begin forgets the packets of the conversation before; the counts stay.
func (e *echoCheck) begin() { e.sent, e.next, e.started = e.sent[:0], 0, false }

func (e *echoCheck) speak(sum uint64) {
	if len(e.sent) < keepSpoken {
		e.sent = append(e.sent, sum)
	}
}

// hear places one packet. What is skipped counts as lost from the first speech that came back on: where an echo begins
// is the server's decision, and silence before that cannot be placed.
func (e *echoCheck) hear(sum uint64, silence bool) {
	if silence && !e.started && slices.Contains(e.sent, sum) {
		e.identical++
		return
	}
	ahead := e.sent[e.next:]
	if silence && len(ahead) > silenceReach {
		ahead = ahead[:silenceReach]
	}
	if i := slices.Index(ahead, sum); i >= 0 {
		if e.started {
			e.lost += uint64(i)
		}
		e.identical++
		e.next += i + 1
		e.started = true
		return
	}
	if slices.Contains(e.sent[:e.next], sum) {
		e.outOfOrder++
		return
	}
	e.foreign++
}
