package session

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/envelope"
	"fleetd/internal/jsonspan"
	"fleetd/internal/mcpclient"
)

// Session is one device's presence on this node: from Accept to Close. Its
// front end feeds it from one goroutine; everything else comes from any.
type Session struct {
	svc       *Hub
	entry     *entry
	conn      Conn
	client    *mcpclient.Client
	who       devices.Identity
	id        string
	epoch     devices.Epoch
	connected time.Time
	remote    netip.Addr // of the connection, if it has one

	mu     sync.Mutex
	seq    int64
	closed devices.CloseReason // empty while open
	hellos int                 // answered on this connection

	// Together, since there is a session for every device and each gap counts.
	announced   bool // `online` was published
	leaving     bool // takes no new calls: the node stops
	handshaking bool
	again       bool // another handshake was asked for while one runs
	initialized bool // on this connection
	partial     bool // the catalog
	ownPartial  bool // the own one
	dismissed   bool // a conversation of a dead node; used by HandleControl alone
	readied     bool // its tools were read on this connection
	relistDue   bool // the list is read again when relistEvery has passed
	// unrecorded: the catalog waits to be entered into the records; unrecordedNew: no
	// device had it before.
	unrecorded    bool
	unrecordedNew bool
	probing       probing
	features      devices.Features

	mcp          devices.MCPState
	mcpError     string
	board        string // as `initialize` on this connection said
	firmware     string
	relistAt     time.Time
	attempts     int32
	inFlight     int32
	retry        *time.Timer
	grantExpires time.Time
	catalog      *catalog.Catalog // shown and called by; may be a guess while stale
	catalogState devices.CatalogState
	own          devices.Hash // the device's last list whose history entry is stored

	queue []chan struct{} // callers waiting for a slot, first come first served

	messages []waiting // for the device, while it has no conversation

	callers any // what the callers of the device share; nil until somebody needs it

	audioPackets uint64 // of conversations that have ended
	audioDropped uint64
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
	x.mcp, x.catalogState = devices.MCPUnknown, devices.CatalogUnknown
	x.client = mcpclient.New((*sessionPeer)(x))
}

// startCatalog shows the device's own last catalog, else the one its firmware
// image is known for, until the list is verified. The caller holds e.mu.
func (x *Session) startCatalog(e *entry, known *catalog.Cache) {
	if e.listedFW != notRecorded { // else that list is not stored
		x.own, x.ownPartial = e.catalog, e.partial
	}
	if cat := known.Get(e.catalog); cat != nil {
		x.catalog, x.partial = cat, e.partial
	} else if cat := known.ForELF(e.device.Load().ELF); cat != nil {
		x.catalog = cat
	}
	if x.catalog != nil {
		x.catalogState = devices.CatalogStale
	}
}

// Device is the id of its device.
func (x *Session) Device() devices.ID { return x.who.Device }

// ID is the session id that the device was told.
func (x *Session) ID() string { return x.id }

// Epoch orders the sessions of one device. It rises once if another node gave
// the device up with a higher one.
func (x *Session) Epoch() devices.Epoch {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.epoch
}

// ClosedError is what requests pending on a closed session fail with.
type ClosedError struct{ Reason devices.CloseReason }

func (e ClosedError) Error() string { return "session closed: " + string(e.Reason) }

// ByDevice tells whether the device's own going ended the session.
func (e ClosedError) ByDevice() bool {
	return e.Reason == devices.CloseGone || e.Reason == devices.CloseDead || e.Reason == devices.CloseSuperseded
}

// Close ends the session: pending calls fail, the connection is closed, the
// device goes offline unless a newer session has taken over. The first reason
// counts; further calls do nothing.
func (x *Session) Close(reason devices.CloseReason) {
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
	x.client.Close(ClosedError{reason})
	x.closeConversation(reason)
	x.conn.Close(reason)
	s.ports.Directory.Release(x.who.Device)
	s.stats.Closed.Add(reason, 1)
	if !announced {
		return // nobody was told that it is there
	}
	s.ports.Records.SavePresence(presence)
	s.stats.States.Add(State{x.who.Transport, state}, -1)
	fields := jsonspan.AppendString([]byte(`"reason":`), string(reason))
	s.ports.Publisher.Publish(devices.Event{Kind: devices.EventOffline, Device: x.who.Device, Session: x.id, Epoch: presence.Epoch, Seq: presence.Seq,
		Time: time.Now(), MsgID: offlineID(x.who.Device, presence.Epoch), Fields: fields})
	s.tell(func(l Lifecycle) { l.Gone(x.who.Device, x.id, reason) })
	s.log.Info("device disconnected", "device", x.who.Device, "session", x.id, "epoch", presence.Epoch, "transport", x.who.Transport, "reason", reason)
}

// presenceLocked takes the next sequence number and describes the session.
func (x *Session) presenceLocked(online bool) devices.Presence {
	x.seq++
	p := devices.Presence{Device: x.who.Device, Epoch: x.epoch, Seq: x.seq, Online: online, Node: x.svc.cfg.Node, Session: x.id,
		ClientID: x.who.ClientID, Transport: x.who.Transport, Reason: string(x.closed), ConnectedAt: x.connected.UTC(),
		LastSeen: time.Now().UTC(), MCP: x.mcp, MCPError: x.mcpError, Catalog: x.own, Partial: x.ownPartial,
		KeepCatalog: x.own == (devices.Hash{}) && x.mcp != devices.MCPNone}
	if x.who.Verified {
		p.Generation = x.who.Generation
	}
	if x.catalog != nil && x.catalog.Hash == x.own {
		p.Tools = len(x.catalog.Tools)
	}
	return p
}

// publish sends an event of this session. Stored events carry a message id.
func (x *Session) publish(kind devices.EventKind, subject string, fields []byte, stored bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.publishLocked(kind, subject, fields, stored)
}

// publishLocked is publish for those who hold the lock; publishers never block.
func (x *Session) publishLocked(kind devices.EventKind, subject string, fields []byte, stored bool) {
	x.seq++
	e := devices.Event{Kind: kind, Device: x.who.Device, Subject: subject, Session: x.id, Epoch: x.epoch, Seq: x.seq, Time: time.Now(), Fields: fields}
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
		return ClosedError{reason} // the connection lingers; its device has moved on
	}
	if x.client.HandleKnown(msg) {
		return nil
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
	x.dismiss(m.SessionID)
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
		x.message(string(m.Type), m, msg)
		return nil
	}
}

// Answered is how many answers of the device were waited for.
func (x *Session) Answered() uint32 { return x.client.Answered() }

// message does what a message means for the conversation, and publishes it for
// whoever listens.
func (x *Session) message(kind string, m envelope.Message, msg []byte) {
	c := x.entry.conversation.Load()
	if c != nil {
		c.Interpret(kind, m.SessionID, msg)
	}
	if !x.takeToken() {
		return
	}
	if c != nil {
		c.Pass(kind, msg)
	}
	x.svc.stats.Notified.Add(1)
	fields := append([]byte(`"message":`), msg...)
	x.publish(devices.EventMessage, devices.SubjectTokens(kind), fields, false)
}

// takeToken is the bucket of notifications and messages.
func (x *Session) takeToken() bool {
	x.entry.mu.Lock()
	ok := x.entry.chatter.Take(time.Now(), notificationRate, notificationBurst)
	x.entry.mu.Unlock()
	if !ok {
		x.svc.stats.NotifyDrops.Add(1)
	}
	return ok
}

// sessionPeer is the session as its MCP client sees it.
type sessionPeer Session

// SendMCP wraps the payload and writes it.
func (p *sessionPeer) SendMCP(payload []byte) error {
	buf := sendBuffers.Get().(*[]byte)
	*buf = envelope.AppendMCP((*buf)[:0], p.id, payload)
	err := (*Session)(p).sendControl(*buf)
	sendBuffers.Put(buf)
	return err
}

// Answer writes the front end's answer to a hello.
func (x *Session) Answer(msg []byte) error { return x.sendControl(msg) }

// sendControl writes one message; a device that takes none is ended as slow.
func (x *Session) sendControl(msg []byte) error {
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

// DeviateMCP counts a deviation under the device's firmware version.
func (p *sessionPeer) DeviateMCP(d mcpclient.Deviation) {
	key := DeviationKey{d, p.entry.device.Load().Firmware}
	stats := &p.svc.stats
	if stats.Deviations.Len() >= MaxDeviationKeys && stats.Deviations.Get(key) == 0 {
		key.Firmware = "other"
	}
	stats.Deviations.Add(key, 1)
	if d == mcpclient.DeviationLateReply {
		(*Session)(p).answered()
	}
}
