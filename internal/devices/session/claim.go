package session

import (
	"context"
	"fmt"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
)

// simultaneousWindow is how close in time two connections count as simultaneous: then the
// higher epoch wins, since neither node can tell which was first.
const simultaneousWindow = 2 * time.Second

func (x *Session) claim(kind devices.ClaimKind) { x.svc.ports.Directory.Claim(x.claimOf(kind)) }

// remind repeats the claim, in case it was lost.
func (x *Session) remind() { x.svc.ports.Directory.Remind(x.claimOf(devices.ClaimReassert)) }

func (x *Session) claimOf(kind devices.ClaimKind) devices.Claim {
	c := devices.Claim{Device: x.entry.id, Kind: kind, Node: x.svc.cfg.Node, Epoch: x.Epoch()}
	if x.verified {
		c.Generation = x.generation
	}
	return c
}

// OnClaim handles a claim of another node. It does not wait for the device: claims are
// handled in order, and a connection may block for seconds.
func (s *Hub) OnClaim(c devices.Claim) {
	e := s.table.get(c.Device)
	if e == nil {
		return
	}
	e.mu.Lock()
	e.lastEpoch = max(e.lastEpoch, c.Epoch) // a later connection here gets a higher epoch
	e.confirmed = max(e.confirmed, c.Generation)
	e.heldElsewhere = true
	e.mu.Unlock()
	x := e.session.Load()
	if x == nil || !fenced {
		return
	}
	switch own := x.Epoch(); c.Kind {
	case devices.ClaimConnect:
		if x.holdsAgainst(own, c) {
			x.claim(devices.ClaimConnect) // the other node receives it and ends its session
			return
		}
		s.run(func() { x.stepDown(c, true) }) // not run if the node is stopping, which ends the session as well
	case devices.ClaimReassert:
		if x.outranks(own, c) {
			x.claim(devices.ClaimReassert)
		} else {
			s.run(func() { x.stepDown(c, false) })
		}
	case devices.ClaimAnswer:
		x.raiseEpoch(c)
	}
}

// holdsAgainst reports whether the session is kept despite a connect claim: only if it has
// just connected, by this node's own clock, and has the higher epoch, which both nodes
// compare alike.
func (x *Session) holdsAgainst(own devices.Epoch, c devices.Claim) bool {
	return time.Since(x.connected) < simultaneousWindow && x.outranks(own, c)
}

// outranks compares epochs; of equal ones the node with the higher name wins, on both
// nodes alike.
func (x *Session) outranks(own devices.Epoch, c devices.Claim) bool {
	return own > c.Epoch || own == c.Epoch && x.svc.cfg.Node > c.Node
}

// stepDown ends the session in favor of another node's.
func (x *Session) stepDown(c devices.Claim, answer bool) {
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

// raiseEpoch gives the session an epoch above the one that ended in its favor, whose rows
// would otherwise be newer, and ends the device's conversation with the other node.
func (x *Session) raiseEpoch(c devices.Claim) {
	x.raiseEpochAbove(c.Epoch)
	if c.Conversation != "" && x.transport == devices.TransportMQTT {
		x.svc.run(func() { x.sayGoodbye(c.Conversation) })
	}
}

// Reassert claims all devices of this node: after a partition.
func (s *Hub) Reassert() { s.Sessions(func(x *Session) { x.claim(devices.ClaimReassert) }) }

// lostPage is how many devices MarkNodeLost marks at a time.
const lostPage = 500

// MarkNodeLost marks the devices that a dead node left online as offline, and publishes
// their events, but for those that are connected here: it may have been a former process
// of this node. Every node that detects it may do so; the stream keeps one event of each.
// online reads a page of rows after a device, in order of ids. lost is also valid with an
// error.
func (s *Hub) MarkNodeLost(ctx context.Context, node string, online func(ctx context.Context, node string, after devices.ID, limit int) ([]devices.Presence, error)) (lost int, err error) {
	after := devices.ID("")
	for {
		rows, err := online(ctx, node, after, lostPage)
		if err != nil {
			return lost, fmt.Errorf("read devices of node %s: %w", node, err)
		}
		for _, p := range rows {
			if s.markLost(p) {
				lost++
			}
		}
		if len(rows) < lostPage {
			return lost, nil
		}
		after = rows[len(rows)-1].Device
	}
}

// markLost marks one device as offline, unless it is connected here.
func (s *Hub) markLost(p devices.Presence) bool {
	if s.table.session(p.Device) != nil {
		return false
	}
	p.Online, p.Reason, p.Seq, p.LastSeen = false, devices.OfflineNodeLost, p.Seq+1, clock.Now()
	s.ports.Records.SavePresence(p)
	s.ports.Publisher.Publish(devices.Event{Kind: devices.EventOffline, Device: p.Device, Session: p.Session, Epoch: p.Epoch, Seq: p.Seq, Time: clock.Now(),
		MsgID: offlineID(p.Device, p.Epoch), Fields: jsonspan.AppendString([]byte(`"reason":`), devices.OfflineNodeLost)})
	return true
}
