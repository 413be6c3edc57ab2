package upstream

import (
	"bytes"
	"context"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/speech"
	"fleetd/internal/envelope"
	"fleetd/internal/jsonspan"
	"fleetd/internal/tasks"
)

// phase is how far a conversation is with its chat server.
type phase uint8

const (
	phaseNew    phase = iota // Begin has not come yet
	phaseWanted              // being dialled, or saying hello: everything queues
	phaseUp                  // everything is passed on
	phaseParked              // it failed; over WebSocket the device's next `listen` dials again
	phaseEnded
)

// talk is one conversation. While it has a chat server one goroutine dials,
// reads and takes leave, and another writes when there is something to write;
// a parked one has none.
type talk struct {
	b   *Bridge
	c   *speech.Conversation
	udp bool // it can be hung up; a WebSocket is its own conversation
	// over is set by whoever ends the conversation first, so that the device is
	// told goodbye by one of them only.
	over   atomic.Bool
	nudge  chan struct{} // the device has spoken while leave is taken
	logged bool          // something unusable; of the running goroutine

	mu       sync.Mutex
	ctx      context.Context // from begin to end
	cancel   context.CancelFunc
	phase    phase
	running  bool
	writing  bool
	link     *link // dialled; nil before and after
	queue    []item
	next     int // index of the first item not written
	frames   int // of those waiting
	bytes    int
	failures int       // since the last hello of a chat server
	restAt   time.Time // when the next one may be dialled
}

// item is one thing to write.
type item struct {
	kind itemKind
	data []byte
	buf  *[]byte // of a frame, which is pooled
}

type itemKind uint8

const (
	itemFrame   itemKind = iota // a binary message
	itemMessage                 // of the device, its session id to be replaced
	itemAnswer                  // an MCP payload
	itemPing
)

var frameBuffers = sync.Pool{New: func() any { b := make([]byte, 0, 256); return &b }}

func newTalk(b *Bridge, c *speech.Conversation) *talk {
	return &talk{b: b, c: c, udp: c.Who().Transport == devices.TransportMQTT, nudge: make(chan struct{}, 1)}
}

// begin starts to dial; false if the conversation has ended already.
func (t *talk) begin() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.phase == phaseEnded {
		return false
	}
	t.ctx, t.cancel = context.WithCancel(t.b.ctx)
	t.phase = phaseWanted
	t.runLocked()
	return true
}

func (t *talk) runLocked() {
	if !t.running {
		t.running = t.b.start(t.run)
	}
}

// end is the core's: nothing is sent in either direction afterwards.
func (t *talk) end() {
	t.over.Store(true)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.phase = phaseEnded
	t.clearLocked()
	if t.cancel != nil {
		t.cancel() // wakes the reader
	}
}

// hangup ends the conversation, over UDP, unless it has ended.
func (t *talk) hangup() {
	if t.udp && t.over.CompareAndSwap(false, true) {
		t.c.Hangup()
	}
}

// audio queues one frame of the device.
func (t *talk) audio(f envelope.Frame) {
	buf := frameBuffers.Get().(*[]byte)
	msg, err := envelope.Framing2.AppendFrame((*buf)[:0], f)
	*buf = msg
	if err != nil { // an empty one, or longer than any device sends
		frameBuffers.Put(buf)
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pushLocked(item{kind: itemFrame, data: msg, buf: buf})
}

// message queues one message of the device.
func (t *talk) message(kind string, msg []byte) {
	listens := kind == "listen" && startsListening(msg)
	t.mu.Lock()
	defer t.mu.Unlock()
	if kind == "abort" && t.link != nil {
		t.link.hushed.Store(true)
	}
	if t.phase == phaseParked {
		if listens || kind == "abort" {
			select {
			case t.nudge <- struct{}{}:
			default:
			}
		}
		if t.udp || !listens {
			t.b.Dropped.Add(DropNoUpstream, 1)
			return
		}
		t.phase = phaseWanted
		t.runLocked()
	}
	t.pushLocked(item{kind: itemMessage, data: bytes.Clone(msg)})
}

// startsListening tells whether a `listen` message begins something.
func startsListening(msg []byte) bool {
	state := stateOf(msg)
	return state == "start" || state == "detect"
}

// stateOf is the string member `state` of a message.
func stateOf(msg []byte) string {
	state, _ := jsonspan.String(jsonspan.Member(msg, "state"))
	return state
}

// answer queues an MCP payload for the connection that asked.
func (t *talk) answer(l *link, payload []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.link != l {
		t.b.Dropped.Add(DropLate, 1)
		return
	}
	t.pushLocked(item{kind: itemAnswer, data: payload})
}

// pushLocked queues the item and starts the writer. The newest is refused when
// the queue is full, so that the beginning of what is said is not lost; without
// a chat server the newest frames are kept.
func (t *talk) pushLocked(it item) {
	full := t.bytes+len(it.data) > MaxQueuedBytes
	switch {
	case t.phase == phaseEnded:
		it.release()
		return
	case it.kind == itemFrame && t.phase == phaseParked:
		for t.frames >= KeptFrames { // nothing but frames waits then
			old := t.popLocked()
			old.release()
			t.b.Dropped.Add(DropNoUpstream, 1)
		}
	case it.kind == itemFrame:
		full = full || t.frames >= MaxQueuedFrames
	default:
		full = full || len(t.queue)-t.next-t.frames >= MaxQueuedMessages
	}
	if full {
		it.release()
		t.b.Dropped.Add(DropFull, 1)
		return
	}
	if t.next > 0 && t.next >= len(t.queue)/2 {
		t.queue, t.next = append(t.queue[:0], t.queue[t.next:]...), 0
	}
	t.queue = append(t.queue, it)
	t.bytes += len(it.data)
	if it.kind == itemFrame {
		t.frames++
	}
	t.writeLocked()
}

func (t *talk) popLocked() item {
	it := t.queue[t.next]
	t.queue[t.next] = item{}
	t.next++
	t.bytes -= len(it.data)
	if it.kind == itemFrame {
		t.frames--
	}
	return it
}

func (t *talk) clearLocked() {
	for t.next < len(t.queue) {
		it := t.popLocked()
		it.release()
	}
	t.queue, t.next = nil, 0
}

// release gives a frame's buffer back.
func (it item) release() {
	if it.buf != nil && cap(*it.buf) <= 4096 {
		frameBuffers.Put(it.buf)
	}
}

// writeLocked starts the writer if there is something to write and nobody does.
func (t *talk) writeLocked() {
	if !t.writing && t.phase == phaseUp && t.next < len(t.queue) {
		t.writing = t.b.start(t.write)
	}
}

// write writes what is queued, then ends.
func (t *talk) write() {
	defer tasks.Contain(t.b.opt.Log, func() { t.mu.Lock(); t.writing = false; t.mu.Unlock() })
	for {
		t.mu.Lock()
		l := t.link
		if t.phase != phaseUp || l == nil || t.next == len(t.queue) {
			t.writing = false
			t.mu.Unlock()
			return
		}
		it := t.popLocked()
		t.mu.Unlock()
		err := l.write(it)
		it.release()
		if err != nil {
			t.mu.Lock()
			if t.link == l && t.phase == phaseUp {
				t.phase = phaseWanted // nothing more goes this way; the reader ends it
			}
			t.mu.Unlock()
			l.interrupt()
		}
	}
}

// run is the conversation's goroutine: one chat server after the other as long
// as one is wanted.
func (t *talk) run() {
	defer tasks.Contain(t.b.opt.Log, func() {
		t.park()
		t.stopRunning()
		t.hangup()
	})
	for t.await() {
		l := &link{t: t}
		outcome, err := l.converse()
		t.park()
		t.note(outcome, err)
		t.part(l)
	}
	t.hangup() // the bridge closes; after End it does nothing
}

// await waits until a chat server is wanted and may be dialled; false if none is.
func (t *talk) await() bool {
	t.mu.Lock()
	rest := time.Until(t.restAt)
	if t.phase != phaseWanted || t.ctx.Err() != nil {
		t.running = false
		t.mu.Unlock()
		return false
	}
	t.mu.Unlock()
	if rest <= 0 {
		return true
	}
	timer := time.NewTimer(rest)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-t.ctx.Done():
		t.stopRunning()
		return false
	}
}

func (t *talk) stopRunning() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.running = false
}

// park gives the connection up: what waited for it is of a conversation that
// the next one knows nothing of.
func (t *talk) park() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.link = nil
	t.restAt = time.Now().Add(min(RedialFirst<<min(t.failures, 5), RedialLast))
	t.failures++
	t.clearLocked()
	select { // of a leave that was taken before
	case <-t.nudge:
	default:
	}
	if t.phase != phaseEnded {
		t.phase = phaseParked
	}
}

var ttsStop = []byte(`{"type":"tts","state":"stop"}`)

// part takes leave of the device when the chat server has gone: what it said is
// played out, an unfinished speech gets its end, then the conversation is hung
// up. Over WebSocket that is all: the device's next `listen` dials again.
func (t *talk) part(l *link) {
	if t.over.Load() {
		return
	}
	if l.speaking {
		_ = t.c.Send(by, ttsStop) // fails if the device is away
	}
	if !t.udp {
		return
	}
	if rest := min(time.Until(l.playedOut), speech.MaxSpeech); (rest > 0 || l.speaking) && !l.hushed.Load() {
		timer := time.NewTimer(max(rest, 0) + speechTail)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-t.nudge: // it has stopped playing
		case <-t.ctx.Done():
		}
	}
	t.hangup()
}

// note counts how a connection ended, and says it.
func (t *talk) note(outcome Outcome, err error) {
	t.b.Connections.Add(outcome, 1)
	log := t.b.opt.Log.With("device", t.c.Who().Device, "session", t.c.ID(), "outcome", outcome)
	switch outcome {
	case DialFailed, HelloMissing:
		log.Warn("chat server is not there: check --voice-upstream and that it runs", "error", err)
	default:
		log.Debug("connection to the chat server ended", "error", err)
	}
}
