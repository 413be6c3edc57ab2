package session

import (
	"context"
	"fmt"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

// closeCalls is how close to each other two connections count as simultaneous:
// then the higher epoch wins, since neither node knows which was first.
const closeCalls = 2 * time.Second

func (x *Session) claim(kind devices.ClaimKind) { x.svc.ports.Directory.Claim(x.claimOf(kind)) }

// remind claims the device again, in case a claim was lost.
func (x *Session) remind() { x.svc.ports.Directory.Remind(x.claimOf(devices.ClaimReassert)) }

func (x *Session) claimOf(kind devices.ClaimKind) devices.Claim {
	c := devices.Claim{Device: x.who.Device, Kind: kind, Node: x.svc.cfg.Node, Epoch: x.Epoch()}
	if x.who.Verified {
		c.Generation = x.who.Generation
	}
	return c
}

// Claimed takes a claim of another node. It does not wait for the device: claims
// come one after the other, and a connection may be stuck for seconds.
func (s *Hub) Claimed(c devices.Claim) {
	e := s.table.get(c.Device)
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
	case devices.ClaimConnect:
		if x.stands(mine, c) {
			x.claim(devices.ClaimConnect) // they hear it, and give way
			return
		}
		s.run(func() { x.yield(c, true) }) // not while the node stops, which ends the session as well
	case devices.ClaimReassert:
		if x.outranks(mine, c) {
			x.claim(devices.ClaimReassert)
		} else {
			s.run(func() { x.yield(c, false) })
		}
	case devices.ClaimAnswer:
		x.rise(c)
	}
}

// stands tells whether the session stands against a connect claim: only if it
// has just connected itself, by this node's own clock, and has the higher epoch,
// which both nodes then see alike.
func (x *Session) stands(mine devices.Epoch, c devices.Claim) bool {
	return time.Since(x.connected) < closeCalls && x.outranks(mine, c)
}

// outranks compares epochs; of equal ones that of the node with the higher name
// counts more, for both nodes alike.
func (x *Session) outranks(mine devices.Epoch, c devices.Claim) bool {
	return mine > c.Epoch || mine == c.Epoch && x.svc.cfg.Node > c.Node
}

// yield ends the session in favour of another node's.
func (x *Session) yield(c devices.Claim, answer bool) {
	conversation := ""
	if open := x.entry.conversation.Load(); open != nil && !open.IsOwned() {
		conversation = open.ID()
		defer open.End()
	}
	x.svc.log.Info("device is held by another node", "device", c.Device, "session", x.id, "epoch", x.Epoch(), "other", c.Node)
	x.Close(devices.CloseSuperseded)
	if answer {
		x.svc.ports.Directory.Claim(devices.Claim{Device: c.Device, Kind: devices.ClaimAnswer, Node: x.svc.cfg.Node, Epoch: x.Epoch(), Conversation: conversation})
	}
}

// rise puts the session above one that gave way with a higher epoch, whose rows
// would otherwise stand in front of ours, and ends what the device still has
// open with the other node.
func (x *Session) rise(c devices.Claim) {
	x.riseAbove(c.Epoch)
	if c.Conversation != "" && x.who.Transport == devices.TransportMQTT {
		x.svc.run(func() { x.sayGoodbye(c.Conversation) })
	}
}

// Reassert claims everything that this node holds, to all nodes: after a partition.
func (s *Hub) Reassert() { s.Sessions(func(x *Session) { x.claim(devices.ClaimReassert) }) }

// losePage bounds what LoseNode marks at a time.
const losePage = 500

// LoseNode marks what a dead node left online as offline, and says so: every
// node that finds out does it, and the stream keeps one event of each. Only what
// connected before a time is lost, unless that is zero: later a new start of the
// node holds it. online reads a page of such rows behind a device, in id order.
// The number of devices counts also with an error.
func (s *Hub) LoseNode(ctx context.Context, node string, before time.Time,
	online func(ctx context.Context, node string, before time.Time, after devices.ID, limit int) ([]devices.Presence, error)) (lost int, err error) {
	after := devices.ID("")
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
func (s *Hub) lose(p devices.Presence) {
	if s.table.session(p.Device) != nil {
		return
	}
	p.Online, p.Reason, p.Seq, p.LastSeen = false, string(reasonNodeLost), p.Seq+1, time.Now().UTC()
	s.ports.Records.SavePresence(p)
	s.ports.Publisher.Publish(devices.Event{Kind: devices.EventOffline, Device: p.Device, Session: p.Session, Epoch: p.Epoch, Seq: p.Seq, Time: time.Now(),
		MsgID: offlineID(p.Device, p.Epoch), Fields: jsonspan.AppendString([]byte(`"reason":`), string(reasonNodeLost))})
}
