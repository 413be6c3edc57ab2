package upstream

import (
	"bytes"
	"context"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/speech"
	"fleetd/internal/envelope"
	"fleetd/internal/jsonspan"
	"fleetd/internal/tasks"
)

// phase is the state of a conversation towards its chat server.
type phase uint8

const (
	phaseNew    phase = iota // before Begin
	phaseWanted              // dialling, or waiting for the hello: everything queues
	phaseUp                  // everything is passed on
	phaseParked              // the connection failed; over WebSocket the device's next `listen` dials again
	phaseEnded
)

// bridgeSession is one conversation. While it has a chat server, one goroutine dials, reads
// and ends the connection, and another writes while items are queued. A parked one has no
// goroutine.
type bridgeSession struct {
	b   *Bridge
	c   *speech.Conversation
	udp bool // it can be hung up; over WebSocket the connection is the conversation
	// ended is set by the side that ends the conversation first, so that the device gets
	// only one goodbye.
	ended  atomic.Bool
	wake   chan struct{} // a message of the device arrived while part waits
	logged bool          // an unusable message was logged; belongs to the running goroutine

	mu       sync.Mutex
	ctx      context.Context // from begin to end
	cancel   context.CancelFunc
	phase    phase
	running  bool
	writing  bool
	link     *link // nil before dialling and after the connection
	queue    []item
	next     int // index of the first item not written
	frames   int // frames in the queue
	bytes    int
	failures int       // since the last hello of a chat server
	redialAt time.Time // when the next chat server may be dialled
}

// item is one message to write.
type item struct {
	kind itemKind
	data []byte
	buf  *[]byte // pooled buffer of a frame
}

type itemKind uint8

const (
	itemFrame   itemKind = iota // a binary message
	itemMessage                 // of the device; its session id is replaced
	itemAnswer                  // an MCP payload
	itemPing
)

var frameBuffers = sync.Pool{New: func() any { b := make([]byte, 0, 256); return &b }}

func newBridgeSession(b *Bridge, c *speech.Conversation) *bridgeSession {
	return &bridgeSession{b: b, c: c, udp: c.Identity().Transport == devices.TransportMQTT, wake: make(chan struct{}, 1)}
}

// begin starts to dial. It returns false if the conversation has ended already.
func (t *bridgeSession) begin() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.phase == phaseEnded {
		return false
	}
	t.ctx, t.cancel = context.WithCancel(t.b.tasks.Context())
	t.phase = phaseWanted
	t.runLocked()
	return true
}

func (t *bridgeSession) runLocked() {
	if !t.running {
		t.running = t.b.tasks.Run(t.run)
	}
}

// end is called by the core: nothing is sent in either direction afterwards.
func (t *bridgeSession) end() {
	t.ended.Store(true)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.phase = phaseEnded
	t.clearLocked()
	if t.cancel != nil {
		t.cancel() // ends the read
	}
}

// hangup ends the conversation over UDP, unless it has ended.
func (t *bridgeSession) hangup() {
	if t.udp && t.ended.CompareAndSwap(false, true) {
		t.c.Hangup()
	}
}

// audio queues one frame of the device.
func (t *bridgeSession) audio(f envelope.Frame) {
	buf := frameBuffers.Get().(*[]byte)
	msg, err := envelope.Framing2.AppendFrame((*buf)[:0], f)
	*buf = msg
	if err != nil { // empty, or longer than a device can send
		frameBuffers.Put(buf)
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pushLocked(item{kind: itemFrame, data: msg, buf: buf})
}

// message queues one message of the device.
func (t *bridgeSession) message(kind string, msg []byte) {
	listens := kind == "listen" && startsListening(msg)
	t.mu.Lock()
	defer t.mu.Unlock()
	if kind == "abort" && t.link != nil {
		t.link.interrupted.Store(true)
	}
	if t.phase == phaseParked {
		if listens || kind == "abort" {
			tasks.Signal(t.wake)
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

// startsListening reports whether a `listen` message starts listening.
func startsListening(msg []byte) bool {
	state := stateOf(msg)
	return state == "start" || state == "detect"
}

// stateOf returns the string member `state` of a message.
func stateOf(msg []byte) string {
	state, _ := jsonspan.String(jsonspan.Member(msg, "state"))
	return state
}

// answer queues an MCP payload for the connection with the request.
func (t *bridgeSession) answer(l *link, payload []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.link != l {
		t.b.Dropped.Add(DropLate, 1)
		return
	}
	t.pushLocked(item{kind: itemAnswer, data: payload})
}

// pushLocked queues the item and starts the writer. When the queue is full, the new item is
// refused, so that the beginning of speech is kept; without a chat server, the newest
// frames are kept.
func (t *bridgeSession) pushLocked(it item) {
	full := t.bytes+len(it.data) > MaxQueuedBytes
	switch {
	case t.phase == phaseEnded:
		it.release()
		return
	case it.kind == itemFrame && t.phase == phaseParked:
		for t.frames >= KeptFrames { // only frames are queued then
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

func (t *bridgeSession) popLocked() item {
	it := t.queue[t.next]
	t.queue[t.next] = item{}
	t.next++
	t.bytes -= len(it.data)
	if it.kind == itemFrame {
		t.frames--
	}
	return it
}

func (t *bridgeSession) clearLocked() {
	for t.next < len(t.queue) {
		it := t.popLocked()
		it.release()
	}
	t.queue, t.next = nil, 0
}

// release returns a frame's buffer to the pool.
func (it item) release() {
	if it.buf != nil && cap(*it.buf) <= 4096 {
		frameBuffers.Put(it.buf)
	}
}

// writeLocked starts the writer if items are queued and no writer runs.
func (t *bridgeSession) writeLocked() {
	if !t.writing && t.phase == phaseUp && t.next < len(t.queue) {
		t.writing = t.b.tasks.Run(t.write)
	}
}

// write writes the queued items, then ends.
func (t *bridgeSession) write() {
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
				t.phase = phaseWanted // nothing more can be written; the reader ends the connection
			}
			t.mu.Unlock()
			l.interrupt()
		}
	}
}

// run is the goroutine of the conversation. It connects to one chat server after the other
// as long as one is wanted.
func (t *bridgeSession) run() {
	defer tasks.Contain(t.b.opt.Log, func() {
		t.parkConversation()
		t.stopRunning()
		t.hangup()
	})
	for t.awaitDial() {
		l := &link{t: t}
		outcome, err := l.converse()
		t.parkConversation()
		t.logEnd(outcome, err)
		t.finishConversation(l)
	}
	t.hangup() // when the bridge closes; after End it does nothing
}

// awaitDial waits until a chat server may be dialled. It returns false if none is wanted.
func (t *bridgeSession) awaitDial() bool {
	t.mu.Lock()
	wait := time.Until(t.redialAt)
	if t.phase != phaseWanted || t.ctx.Err() != nil {
		t.running = false
		t.mu.Unlock()
		return false
	}
	t.mu.Unlock()
	if wait <= 0 {
		return true
	}
	if !clock.Sleep(t.ctx, wait) {
		t.stopRunning()
		return false
	}
	return true
}

func (t *bridgeSession) stopRunning() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.running = false
}

// parkConversation gives up the connection and drops queued items, since the next chat server starts a
// new conversation.
func (t *bridgeSession) parkConversation() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.link = nil
	t.redialAt = time.Now().Add(min(RedialFirst<<min(t.failures, 5), RedialLast))
	t.failures++
	t.clearLocked()
	select { // clears a signal from before
	case <-t.wake:
	default:
	}
	if t.phase != phaseEnded {
		t.phase = phaseParked
	}
}

var ttsStop = []byte(`{"type":"tts","state":"stop"}`)

// finishConversation finishes a connection towards the device: it waits until the device has played the
// speech, ends an unfinished speech with a `tts stop`, then hangs up. Over WebSocket it does
// not hang up: the device's next `listen` dials again.
func (t *bridgeSession) finishConversation(l *link) {
	if t.ended.Load() {
		return
	}
	if l.speaking {
		_ = t.c.Send(principal, ttsStop) // fails if the device is not connected
	}
	if !t.udp {
		return
	}
	if wait := min(time.Until(l.playedOut), speech.MaxSpeech); (wait > 0 || l.speaking) && !l.interrupted.Load() {
		timer := time.NewTimer(max(wait, 0) + speechTail)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-t.wake: // the device has stopped playing
		case <-t.ctx.Done():
		}
	}
	t.hangup()
}

// logEnd counts and logs how a connection ended.
func (t *bridgeSession) logEnd(outcome Outcome, err error) {
	t.b.Connections.Add(outcome, 1)
	log := t.b.opt.Log.With("device", t.c.Identity().Device, "session", t.c.ID(), "outcome", outcome)
	switch outcome {
	case DialFailed, HelloMissing:
		log.Warn("cannot reach the chat server; check --voice-upstream and that the server is running", "error", err)
	default:
		log.Debug("connection to the chat server ended", "error", err)
	}
}
