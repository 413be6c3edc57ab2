package devices

import (
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"fleetd/internal/envelope"
	"fleetd/internal/jsonspan"
	"fleetd/internal/mcpclient"
)

// Session is one device's presence on this node: from Accept to Close. Its
// front end feeds it from one goroutine; everything else comes from any.
type Session struct {
	svc       *Service
	entry     *entry
	conn      Conn
	client    *mcpclient.Client
	who       Identity
	id        string
	epoch     Epoch
	connected time.Time

	mu        sync.Mutex
	seq       int64
	closed    CloseReason // empty while open
	announced bool        // `online` was published
	audioOpen bool

	mcp          MCPState
	mcpError     string
	handshaking  bool
	again        bool // another handshake was asked for while one runs
	relistAt     time.Time
	attempts     int
	retry        *time.Timer
	initialized  bool // on this connection
	grantExpires time.Time
	catalog      *Catalog // shown and called by; may be a guess while stale
	catalogState CatalogState
	partial      bool
	own          Hash // the device's last list whose history entry is stored
	ownPartial   bool

	inFlight int
	queue    []chan struct{} // callers waiting for a slot, first come first served

	tokens     float32 // of the notification bucket
	tokensAt   time.Time
	audioCount uint64
}

// Limits of a session.
const (
	MaxWaitingCalls   = 16 // behind the calls in flight
	notificationRate  = 20 // per second and device
	notificationBurst = 40
	// MaxNotification bounds the bytes of a notification's method and params;
	// the stream that keeps them is everybody's.
	MaxNotification = 16 << 10
)

func (x *Session) init() {
	x.mcp, x.catalogState = MCPUnknown, CatalogUnknown
	x.tokens, x.tokensAt = notificationBurst, x.connected
	x.client = mcpclient.New((*sessionPeer)(x))
}

// startCatalog shows the device's own last catalog, else the one its firmware
// image is known for, until the list is verified. The caller holds e.mu.
func (x *Session) startCatalog(e *entry, known *catalogs) {
	x.own, x.ownPartial = e.catalog, e.partial
	if cat := known.get(e.catalog); cat != nil {
		x.catalog, x.partial = cat, e.partial
	} else if cat := known.forELF(e.device.Load().ELF); cat != nil {
		x.catalog = cat
	}
	if x.catalog != nil {
		x.catalogState = CatalogStale
	}
}

// ID is the session id that the device was told.
func (x *Session) ID() string { return x.id }

// Epoch orders the sessions of one device.
func (x *Session) Epoch() Epoch { return x.epoch }

// closedError is what requests pending on a closed session fail with.
type closedError struct{ reason CloseReason }

func (e closedError) Error() string { return "session closed: " + string(e.reason) }

// byDevice tells whether the device's own going ended the session.
func (e closedError) byDevice() bool {
	return e.reason == CloseGone || e.reason == CloseDead || e.reason == CloseSuperseded
}

// Close ends the session: pending calls fail, the connection is closed, the
// device goes offline unless a newer session has taken over. The first reason
// counts; further calls do nothing.
func (x *Session) Close(reason CloseReason) {
	x.mu.Lock()
	if x.closed != "" {
		x.mu.Unlock()
		return
	}
	x.closed = reason
	waiting := x.queue
	x.queue = nil
	if x.retry != nil {
		x.retry.Stop()
	}
	state, announced := x.mcp, x.announced
	presence := x.presenceLocked(false)
	x.mu.Unlock()

	for _, ch := range waiting {
		close(ch)
	}
	s := x.svc
	x.entry.session.CompareAndSwap(x, nil)
	x.client.Close(closedError{reason})
	x.conn.Close(reason)
	s.ports.Directory.Release(x.who.Device)
	s.stats.Closed.Add(reason, 1)
	if !announced {
		return // nobody was told that it is there
	}
	s.ports.Records.SavePresence(presence)
	s.stats.States.Add(state, -1)
	fields := jsonspan.AppendString([]byte(`"reason":`), string(reason))
	s.ports.Publisher.Publish(Event{Kind: EventOffline, Device: x.who.Device, Session: x.id, Epoch: x.epoch, Seq: presence.Seq,
		Time: time.Now(), MsgID: offlineID(x.who.Device, x.epoch), Fields: fields})
	s.log.Info("device disconnected", "device", x.who.Device, "session", x.id, "epoch", x.epoch, "transport", x.who.Transport, "reason", reason)
}

// presenceLocked takes the next sequence number and describes the session.
func (x *Session) presenceLocked(online bool) Presence {
	x.seq++
	p := Presence{Device: x.who.Device, Epoch: x.epoch, Seq: x.seq, Online: online, Node: x.svc.cfg.Node, Session: x.id,
		ClientID: x.who.ClientID, Transport: x.who.Transport, Reason: string(x.closed), ConnectedAt: x.connected.UTC(),
		LastSeen: time.Now().UTC(), MCP: x.mcp, MCPError: x.mcpError, Catalog: x.own, Partial: x.ownPartial}
	if x.catalog != nil && x.catalog.Hash == x.own {
		p.Tools = len(x.catalog.Tools)
	}
	return p
}

// publish sends an event of this session. Stored events carry a message id.
func (x *Session) publish(kind EventKind, subject string, fields []byte, stored bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.publishLocked(kind, subject, fields, stored)
}

// publishLocked is publish for those who hold the lock; publishers never block.
func (x *Session) publishLocked(kind EventKind, subject string, fields []byte, stored bool) {
	x.seq++
	e := Event{Kind: kind, Device: x.who.Device, Subject: subject, Session: x.id, Epoch: x.epoch, Seq: x.seq, Time: time.Now(), Fields: fields}
	if stored {
		e.MsgID = x.who.Device.Token() + "-" + strconv.FormatInt(int64(x.epoch), 10) + "-" + strconv.FormatInt(x.seq, 10)
	}
	x.svc.ports.Publisher.Publish(e)
}

// HandleControl takes one text message of the device. Call it from one
// goroutine at a time; msg is not kept. An error says that the message was
// unusable and why; the session goes on.
func (x *Session) HandleControl(msg []byte) error {
	if reason := x.closeReason(); reason != "" {
		return closedError{reason} // the connection lingers; its device has moved on
	}
	m, err := envelope.Parse(msg)
	if err != nil {
		// A broken envelope is most often the firmware's unescaped error text.
		if errors.Is(err, jsonspan.ErrSyntax) || errors.Is(err, jsonspan.ErrUTF8) {
			if x.client.HandleBroken(msg) {
				return nil
			}
		}
		x.svc.stats.BadMessages.Add(1)
		return err
	}
	switch string(m.Type) {
	case envelope.TypeMCP:
		if m.Payload == nil {
			x.svc.stats.BadMessages.Add(1)
			return fmt.Errorf("mcp message without payload")
		}
		return x.client.Handle(m.Payload)
	case "hello":
		// On WebSocket a second answer would poison the device's next
		// connection (websocket_protocol.cc:182-184), so it stays unanswered.
		return fmt.Errorf("second hello on one connection")
	default:
		x.message(string(m.Type), msg)
		return nil
	}
}

// message publishes a message other than MCP for whoever listens.
func (x *Session) message(kind string, msg []byte) {
	if !x.takeToken() {
		return
	}
	x.svc.stats.Notified.Add(1)
	fields := append([]byte(`"message":`), msg...)
	x.publish(EventMessage, SubjectTokens(kind), fields, false)
}

// takeToken is the bucket of notifications and messages.
func (x *Session) takeToken() bool {
	x.mu.Lock()
	now := time.Now()
	x.tokens = min(notificationBurst, x.tokens+float32(now.Sub(x.tokensAt).Seconds()*notificationRate))
	x.tokensAt = now
	ok := x.tokens >= 1
	if ok {
		x.tokens--
	}
	x.mu.Unlock()
	if !ok {
		x.svc.stats.NotifyDrops.Add(1)
	}
	return ok
}

// HandleAudio takes one Opus packet; it is not kept.
func (x *Session) HandleAudio(envelope.Frame) {
	x.svc.stats.AudioFrames.Add(1)
	x.mu.Lock()
	x.audioCount++
	x.mu.Unlock()
}

// sessionPeer is the session as its MCP client sees it.
type sessionPeer Session

// SendMCP wraps the payload and writes it.
func (p *sessionPeer) SendMCP(payload []byte) error {
	buf := sendBuffers.Get().(*[]byte)
	*buf = envelope.AppendMCP((*buf)[:0], p.id, payload)
	err := p.conn.SendControl(*buf)
	sendBuffers.Put(buf)
	if errors.Is(err, ErrOverloaded) {
		(*Session)(p).Close(CloseSlow)
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
	x.publish(EventNotification, NotificationTokens(n.Method), fields, true)
	if n.Method == "notifications/tools/list_changed" {
		x.relist()
	}
}

// DeviateMCP counts a deviation under the device's firmware version.
func (p *sessionPeer) DeviateMCP(d mcpclient.Deviation) {
	key := DeviationKey{d, p.entry.device.Load().Firmware}
	stats := &p.svc.stats
	if stats.Deviations.Len() >= MaxDeviationKeys && stats.Deviations.Get(key) == 0 {
		key.Firmware = "other"
	}
	stats.Deviations.Add(key, 1)
}
