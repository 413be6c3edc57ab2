package devices

import (
	"context"
	"fmt"
	"time"

	"fleetd/internal/jsonspan"
)

// ClaimKind says why a node claims a device.
type ClaimKind string

// Claims. The clocks of two nodes differ, so that of two connections the newer
// one may have the lower epoch; a connect claim therefore wins over whatever is
// held, and the loser's epoch comes back for the winner to rise above.
const (
	ClaimConnect  ClaimKind = "connect"  // the device has just connected here
	ClaimReassert ClaimKind = "reassert" // it still is; the lower epoch gives way
	ClaimAnswer   ClaimKind = "answer"   // a connect claim was obeyed
)

// closeCalls is how close to each other two connections count as simultaneous:
// then the higher epoch wins, since neither node knows which was first.
const closeCalls = 2 * time.Second

// Claim says that a node holds a device's session, or gave it up.
type Claim struct {
	Device ID
	Kind   ClaimKind
	Node   string
	Epoch  Epoch
	// Conversation is, in an answer, the id of the UDP conversation that ended
	// with the session: the device must be told goodbye with it.
	Conversation string
	// Generation is that of the credentials which the device came with: older
	// ones end everywhere.
	Generation int64
}

func (x *Session) claim(kind ClaimKind) {
	c := Claim{Device: x.who.Device, Kind: kind, Node: x.svc.cfg.Node, Epoch: x.Epoch()}
	if x.who.Verified {
		c.Generation = x.who.Generation
	}
	x.svc.ports.Directory.Claim(c)
}

// Claimed takes a claim of another node. It does not wait for the device: claims
// come one after the other, and a connection may be stuck for seconds.
func (s *Service) Claimed(c Claim) {
	e := s.hub.get(c.Device)
	if e == nil {
		return
	}
	e.mu.Lock()
	e.lastEpoch = max(e.lastEpoch, c.Epoch) // a later connection here stands above it
	e.confirmed = max(e.confirmed, c.Generation)
	e.elsewhere = true
	e.mu.Unlock()
	x := e.session.Load()
	if x == nil || !fenced {
		return
	}
	switch mine := x.Epoch(); c.Kind {
	case ClaimConnect:
		if x.stands(mine, c) {
			x.claim(ClaimConnect) // they hear it, and give way
			return
		}
		s.run(func() { x.yield(c, true) }) // not while the node stops, which ends the session as well
	case ClaimReassert:
		if x.outranks(mine, c) {
			x.claim(ClaimReassert)
		} else {
			s.run(func() { x.yield(c, false) })
		}
	case ClaimAnswer:
		x.rise(c)
	}
}

// stands tells whether the session stands against a connect claim: only if it
// has just connected itself, by this node's own clock, and has the higher epoch,
// which both nodes then see alike.
func (x *Session) stands(mine Epoch, c Claim) bool {
	return time.Since(x.connected) < closeCalls && x.outranks(mine, c)
}

// outranks compares epochs; of equal ones that of the node with the higher name
// counts more, for both nodes alike.
func (x *Session) outranks(mine Epoch, c Claim) bool {
	return mine > c.Epoch || mine == c.Epoch && x.svc.cfg.Node > c.Node
}

// yield ends the session in favour of another node's.
func (x *Session) yield(c Claim, answer bool) {
	conversation := ""
	if open := x.entry.conversation.Load(); open != nil && open.owner == nil {
		conversation = open.id
		defer open.end()
	}
	x.svc.log.Info("device is held by another node", "device", c.Device, "session", x.id, "epoch", x.Epoch(), "other", c.Node)
	x.Close(CloseSuperseded)
	if answer {
		x.svc.ports.Directory.Claim(Claim{Device: c.Device, Kind: ClaimAnswer, Node: x.svc.cfg.Node, Epoch: x.Epoch(), Conversation: conversation})
	}
}

// rise puts the session above one that gave way with a higher epoch, whose rows
// would otherwise stand in front of ours, and ends what the device still has
// open with the other node.
func (x *Session) rise(c Claim) {
	x.riseAbove(c.Epoch)
	if c.Conversation != "" && x.who.Transport == TransportMQTT {
		x.svc.run(func() { x.sayGoodbye(c.Conversation) })
	}
}

// Reassert claims everything that this node holds: after a partition, and every
// now and then in case a claim was lost.
func (s *Service) Reassert() { s.Sessions(func(x *Session) { x.claim(ClaimReassert) }) }

// Lease is a node's sign of life in the database.
type Lease struct {
	Node     string
	Instance string // of one start
	Beat     int64  // counts up while it lives
	Started  time.Time
	Version  string
	API      string
	Devices  int
	Stamps   bool // what it asks other nodes carries a stamp
}

// losePage bounds what LoseNode marks at a time.
const losePage = 500

// LoseNode marks what a dead node left online as offline, and says so: every
// node that finds out does it, and the stream keeps one event of each. Only what
// connected before a time is lost, unless that is zero: later a new start of the
// node holds it. online reads a page of such rows behind a device, in id order.
// The number of devices counts also with an error.
func (s *Service) LoseNode(ctx context.Context, node string, before time.Time,
	online func(ctx context.Context, node string, before time.Time, after ID, limit int) ([]Presence, error)) (lost int, err error) {
	after := ID("")
	for {
		rows, err := online(ctx, node, before, after, losePage)
		if err != nil {
			return lost, fmt.Errorf("read devices of node %s: %w", node, err)
		}
		for _, p := range rows {
			s.lose(p)
		}
		lost += len(rows)
		if len(rows) < losePage {
			return lost, nil
		}
		after = rows[len(rows)-1].Device
	}
}

// lose marks one device as offline, unless it is connected here meanwhile.
func (s *Service) lose(p Presence) {
	if s.hub.session(p.Device) != nil {
		return
	}
	p.Online, p.Reason, p.Seq = false, string(reasonNodeLost), p.Seq+1
	s.ports.Records.SavePresence(p)
	s.ports.Publisher.Publish(Event{Kind: EventOffline, Device: p.Device, Session: p.Session, Epoch: p.Epoch, Seq: p.Seq, Time: time.Now(),
		MsgID: offlineID(p.Device, p.Epoch), Fields: jsonspan.AppendString([]byte(`"reason":`), string(reasonNodeLost))})
}
