package session

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"sync"
	"time"
	"unique"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/envelope"
	"fleetd/internal/jsonspan"
	"fleetd/internal/mcpclient"
)

// Session is one device's connection to this node, from Accept to Close. Its front end
// calls it from one goroutine; other methods are safe for concurrent use.
type Session struct {
	svc       *Hub
	entry     *entry
	conn      Conn
	client    *mcpclient.Client
	clientID  string
	transport devices.Transport
	id        string
	epoch     devices.Epoch
	connected time.Time
	remote    netip.Addr // of the connection, if it has one
	// generation is that of the credentials, if it is verified by some.
	generation int64

	mu     sync.Mutex
	seq    int64
	closed devices.CloseReason // empty while open

	// Grouped, since there is a session for every device and padding counts.
	hellos        int32 // answered on this connection
	announced     bool  // `online` was published
	draining      bool  // accepts no new calls: the node is draining
	handshaking   bool
	again         bool // another handshake was requested while one is running
	initialized   bool // on this connection
	partial       bool // of the catalog
	storedPartial bool // of the stored list
	staleEnded    bool // a goodbye was sent for a conversation of a dead node; used only by HandleControl
	toolsRead     bool // its tools were listed on this connection
	relistDue     bool // a relist is scheduled
	// unrecorded: the catalog is not recorded yet; unrecordedNew: it was new to this
	// node.
	unrecorded    bool
	unrecordedNew bool
	verified      bool  // by credentials
	ofClient      bool  // which are of the clientID
	attempts      uint8 // of handshakes that failed in sequence, as far as they count for the pause
	inFlight      int8  // calls, at most Config.CallsPerDevice
	probing       probing
	features      devices.Features

	mcp          devices.MCPState
	mcpError     string
	reported     unique.Handle[devices.Facts] // board and firmware, in `initialize` on this connection
	relistAt     int64                        // when the list was last read again, as clock.Reading
	retry        *time.Timer
	grantExpires int64            // when the upload token expires, in seconds since 1970; 0: never
	catalog      *catalog.Catalog // the list in use; may be a guess while stale
	catalogState devices.CatalogState
	storedList   devices.Hash // the device's last list with a stored history entry

	unused openPath // of the conversation, until something needs it; nil: it is in the entry, or there is none
	use    *use     // nil until needed
}

// use is the state of a session that an idle device does not need. Session.mu protects it.
type use struct {
	queue        devices.Turns   // calls that wait for a slot
	messages     []queuedMessage // for the device, while it has no conversation
	callers      any             // state that dispatch keeps for the device's callers; nil until needed
	audioPackets uint64          // of conversations that have ended
	audioDropped uint64
}

// useLocked returns x.use, and creates it if necessary.
func (x *Session) useLocked() *use {
	if x.use == nil {
		x.use = &use{}
	}
	return x.use
}

// Limits of a session.
const (
	MaxWaitingCalls   = 16 // in addition to the calls in flight
	notificationRate  = 20 // per second and device
	notificationBurst = 40
	// MaxNotification limits the size of a notification's method and params, in bytes:
	// all devices share the stream that stores them.
	MaxNotification = 16 << 10
)

func (x *Session) init() {
	x.mcp, x.catalogState = devices.MCPUnknown, devices.CatalogUnknown
	x.client = mcpclient.New((*sessionPeer)(x))
}

// startCatalog shows the device's previous catalog, else the one of its firmware image,
// until the list is verified. The caller holds e.mu.
func (x *Session) startCatalog(e *entry, known *catalog.Cache) {
	if e.listedFW != notRecorded { // else that list is not stored
		x.storedList, x.storedPartial = e.catalog, e.partial
	}
	if cat := known.Get(e.catalog); cat != nil {
		x.catalog, x.partial = cat, e.partial
	} else if cat := known.ForELF(e.stored.Load().facts.Value().ELF); cat != nil {
		x.catalog = cat
	}
	if x.catalog != nil {
		x.catalogState = devices.CatalogStale
	}
}

// Device returns the id of the device.
func (x *Session) Device() devices.ID { return x.entry.id }

// Remote returns the address of the device's connection; it is zero if the session has none, as over a broker.
func (x *Session) Remote() netip.Addr { return x.remote }

// ID returns the session id that was sent to the device.
func (x *Session) ID() string { return x.id }

// Epoch orders the sessions of one device. It is raised if another node ended a session
// with a higher one.
func (x *Session) Epoch() devices.Epoch {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.epoch
}

// ClosedError is the error of requests that are pending when a session is closed.
type ClosedError struct{ Reason devices.CloseReason }

func (e ClosedError) Error() string { return "session closed: " + string(e.Reason) }

// ByDevice reports whether the device itself ended the session.
func (e ClosedError) ByDevice() bool {
	return e.Reason == devices.CloseGone || e.Reason == devices.CloseDead || e.Reason == devices.CloseSuperseded
}

// Close ends the session: pending calls fail, the connection is closed, and the device goes
// offline unless a newer session has replaced this one. Only the first call has an effect.
func (x *Session) Close(reason devices.CloseReason) {
	x.mu.Lock()
	if x.closed != "" {
		x.mu.Unlock()
		return
	}
	x.closed = reason
	waiting := 0
	if x.use != nil {
		waiting = x.use.queue.Len()
		x.use.queue.Close()
	}
	if x.retry != nil {
		x.retry.Stop()
	}
	if x.unused != nil {
		x.unused = nil
		x.svc.speech.Stats().Conversations.Add(-1)
	}
	state, announced, calls := x.mcp, x.announced, int(x.inFlight)+waiting
	presence := x.presenceLocked(false)
	x.mu.Unlock()

	s := x.svc
	x.entry.session.CompareAndSwap(x, nil)
	x.client.Close(ClosedError{reason})
	x.closeConversation(reason)
	x.conn.Close(reason)
	s.ports.Directory.Release(x.entry.id)
	s.stats.Closed.Add(reason, 1)
	if !announced {
		return // its `online` was not published
	}
	s.ports.Records.SavePresence(presence)
	s.stats.States.Add(State{x.transport, state}, -1)
	fields := jsonspan.AppendString([]byte(`"reason":`), string(reason))
	s.ports.Publisher.Publish(devices.Event{Kind: devices.EventOffline, Device: x.entry.id, Session: x.id, Epoch: presence.Epoch, Seq: presence.Seq,
		Time: clock.Now(), MsgID: offlineID(x.entry.id, presence.Epoch), Fields: fields})
	s.observers.Each(func(l Lifecycle) { l.Gone(x.entry.id, x.id, reason) })
	x.record(devices.Step{Kind: devices.StepClosed, Cause: devices.StepCause(reason), Took: time.Since(x.connected), Calls: calls, Text: closedTexts[state]})
	s.log.Info("device disconnected", "device", x.entry.id, "session", x.id, "epoch", presence.Epoch, "transport", x.transport, "reason", reason)
}

// closedTexts are the texts of the record of a session's end, by what the session did.
var closedTexts = map[devices.MCPState]string{devices.MCPListing: devices.TextListing}

// presenceLocked returns the session's row with the next sequence number.
func (x *Session) presenceLocked(online bool) devices.Presence {
	x.seq++
	p := devices.Presence{Device: x.entry.id, Epoch: x.epoch, Seq: x.seq, Online: online, Node: x.svc.cfg.Node, Session: x.id,
		ClientID: x.clientID, Transport: x.transport, Reason: string(x.closed), ConnectedAt: x.connected.UTC(),
		LastSeen: clock.Now(), MCP: x.mcp, MCPError: x.mcpError, Catalog: x.storedList, Partial: x.storedPartial,
		KeepCatalog: x.storedList == (devices.Hash{}) && x.mcp != devices.MCPNone}
	if x.verified {
		p.Generation = x.generation
	}
	if x.catalog != nil && x.catalog.Hash == x.storedList {
		p.Tools = len(x.catalog.Tools)
	}
	return p
}

// publish publishes an event of this session. Stored events have a message id.
func (x *Session) publish(kind devices.EventKind, subject string, fields []byte, stored bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.publishLocked(kind, subject, fields, stored)
}

// publishLocked is publish for callers that hold the lock; publishers never block.
func (x *Session) publishLocked(kind devices.EventKind, subject string, fields []byte, stored bool) {
	x.seq++
	e := devices.Event{Kind: kind, Device: x.entry.id, Subject: subject, Session: x.id, Epoch: x.epoch, Seq: x.seq, Time: clock.Now(), Fields: fields}
	if stored {
		e.MsgID = x.entry.id.Token() + "-" + strconv.FormatInt(int64(x.epoch), 10) + "-" + strconv.FormatInt(x.seq, 10)
	}
	x.svc.ports.Publisher.Publish(e)
}

// HandleControl handles one text message of the device. Call it from one goroutine at a
// time; it does not keep msg. An error means that the message was not usable; the session
// continues.
func (x *Session) HandleControl(msg []byte) error {
	if reason := x.closeReason(); reason != "" {
		return ClosedError{reason} // the connection is not closed yet
	}
	x.trace(true, msg)
	if x.client.HandleKnown(msg) {
		return nil
	}
	m, err := envelope.Parse(msg)
	if err != nil {
		// A malformed envelope is most often the firmware's unescaped error text.
		if errors.Is(err, jsonspan.ErrSyntax) || errors.Is(err, jsonspan.ErrUTF8) {
			if x.client.HandleBroken(msg) {
				return nil
			}
		}
		x.svc.stats.BadMessages.Add(1)
		return err
	}
	x.endStaleConversation(m.SessionID)
	switch string(m.Type) {
	case envelope.TypeMCP:
		if m.Payload == nil {
			x.svc.stats.BadMessages.Add(1)
			return fmt.Errorf("mcp message without payload")
		}
		return x.client.Handle(m.Payload)
	case "hello":
		return devices.ErrHello
	default:
		x.onMessage(string(m.Type), m, msg)
		return nil
	}
}

// AnswerCount returns the number of answers of the device to pending requests.
func (x *Session) AnswerCount() uint32 { return x.client.Answered() }

// onMessage applies a message to the conversation, and publishes it.
func (x *Session) onMessage(kind string, m envelope.Message, msg []byte) {
	c := x.entry.talk()
	if c != nil {
		c.HandleMessage(kind, m.SessionID, msg)
	}
	if !x.takeToken() {
		return
	}
	if c != nil {
		c.PassToVoice(kind, msg)
	}
	x.svc.stats.Notified.Add(1)
	fields := append([]byte(`"message":`), msg...)
	x.publish(devices.EventMessage, devices.SubjectTokens(kind), fields, false)
}

// takeToken applies the rate limit of notifications and messages.
func (x *Session) takeToken() bool {
	x.entry.mu.Lock()
	if x.entry.messageBucket == nil {
		x.entry.messageBucket = &devices.Bucket{}
	}
	ok := x.entry.messageBucket.Allow(time.Now(), notificationRate, notificationBurst)
	x.entry.mu.Unlock()
	if !ok {
		x.svc.stats.NotifyDrops.Add(1)
		x.record(devices.Step{Kind: devices.StepLimit, Text: "messages"})
	}
	return ok
}

// record records a step of this session.
func (x *Session) record(s devices.Step) {
	if r := x.svc.ports.Recorder; r != nil && x.svc.registry.Status(x.entry.id, "").Known { // the log of a forgotten device is deleted
		s.Device, s.Transport, s.Epoch, s.Remote, s.Proven = x.entry.id, x.transport, x.Epoch(), x.remote, true
		r.Step(s)
	}
}

// trace shows a message to those who trace the device.
func (x *Session) trace(received bool, msg []byte) {
	if t := x.svc.ports.Tracer; t != nil {
		t.Message(x.entry.id, received, msg)
	}
}

// sessionPeer implements mcpclient's peer for a session.
type sessionPeer Session

// SendMCP writes the payload in an envelope.
func (p *sessionPeer) SendMCP(payload []byte) error {
	buf := sendBuffers.Get().(*[]byte)
	*buf = envelope.AppendMCP((*buf)[:0], p.id, payload)
	err := (*Session)(p).sendControl(*buf)
	sendBuffers.Put(buf)
	return err
}

// SendHelloReply writes the front end's answer to a hello.
func (x *Session) SendHelloReply(msg []byte) error { return x.sendControl(msg) }

// sendControl writes one message; if the queue is full, it ends the session as slow.
func (x *Session) sendControl(msg []byte) error {
	x.trace(false, msg)
	err := x.conn.SendControl(msg)
	if errors.Is(err, devices.ErrOverloaded) {
		x.Close(devices.CloseSlow)
	}
	return err
}

var sendBuffers = sync.Pool{New: func() any { b := make([]byte, 0, 1024); return &b }}

// NotifyMCP publishes a notification of the device.
func (p *sessionPeer) NotifyMCP(n mcpclient.Notification) {
	x := (*Session)(p)
	if len(n.Params)+len(n.Method) > MaxNotification {
		x.svc.stats.NotifyDrops.Add(1)
		return
	}
	if !x.takeToken() {
		return
	}
	x.svc.stats.Notified.Add(1)
	fields := jsonspan.AppendString([]byte(`"method":`), n.Method)
	if n.Params != nil {
		fields = append(fields, `,"params":`...)
		fields = append(fields, n.Params...)
	}
	x.publish(devices.EventNotification, devices.NotificationTokens(n.Method), fields, true)
	if n.Method == "notifications/tools/list_changed" {
		x.Relist()
	}
}

// DeviateMCP counts a deviation by the device's firmware version.
func (p *sessionPeer) DeviateMCP(d mcpclient.Deviation) {
	key := DeviationKey{d, p.entry.stored.Load().facts.Value().Firmware}
	stats := &p.svc.stats
	if stats.Deviations.Len() >= MaxDeviationKeys && stats.Deviations.Get(key) == 0 {
		key.Firmware = "other"
	}
	stats.Deviations.Add(key, 1)
	(*Session)(p).record(devices.Step{Kind: devices.StepDeviation, Text: string(d)})
	if d == mcpclient.DeviationLateReply {
		(*Session)(p).onAnswer()
	}
}
