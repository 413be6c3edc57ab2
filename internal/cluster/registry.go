package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
	"fleetd/internal/tasks"
)

// Subjects of the registry; each ends with the name of the sending node. Changes are
// broadcast after the commit; a node that misses one reads the log. A revocation that
// the database did not accept, and a query of other nodes' changes, are answered on an
// inbox that the signed body names, so that a sender of a recorded message gets no
// answer.
const (
	verbChanges = "changes"
	verbRevoke  = "revoke"
	verbAsk     = "ask"
	verbReply   = "reply"
)

const (
	// maxChanges limits the changes of one message, in bytes; NATS accepts 1 MiB.
	maxChanges = 512 << 10
	// upPause is the pause between two checks whether NATS is connected.
	upPause = 50 * time.Millisecond
	// peerSettle is how long further answers are awaited after the first.
	peerSettle = 300 * time.Millisecond
)

// registryMessage is the wire form of all messages about the registry.
type registryMessage struct {
	Node       string               `json:"node"`
	Reply      string               `json:"reply,omitempty"` // inbox for the answer
	Changes    []devices.Change     `json:"changes,omitempty"`
	Revocation *registry.Revocation `json:"revocation,omitempty"`
	At         *devices.Position    `json:"at,omitempty"`
	Answer     *registry.PeerAnswer `json:"answer,omitempty"`
}

// Peers implements registry.Peers: it exchanges changes with the other nodes.
type Peers struct {
	link     *Link
	registry atomic.Pointer[registry.Registry]
}

// Peers returns the registry's connection to the other nodes.
func (l *Link) Peers() *Peers { return &Peers{link: l} }

// Follow subscribes to changes and queries of other nodes for r. Call it once.
func (p *Peers) Follow(r *registry.Registry) error {
	l := p.link
	if l.opt.SingleNode {
		return nil
	}
	p.registry.Store(r)
	var errs []error
	for _, verb := range []string{verbChanges, verbRevoke, verbAsk} {
		_, err := l.opt.Conn.Subscribe(l.nodeSubject(verb, "*"), func(msg *nats.Msg) { p.onMessage(verb, msg) })
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// send publishes a message to all other nodes. It reports whether NATS accepted it.
func (p *Peers) send(verb string, m registryMessage) bool {
	m.Node = p.link.opt.Node
	return p.link.broadcast(verb, m)
}

// Publish publishes changes that this node committed.
func (p *Peers) Publish(list []devices.Change) {
	l := p.link
	if l.opt.SingleNode {
		return
	}
	for len(list) > 0 {
		n, size := 0, 0
		for ; n < len(list) && (n == 0 || size+len(list[n].Value) < maxChanges); n++ {
			size += len(list[n].Value) + 256
		}
		if !p.send(verbChanges, registryMessage{Changes: list[:n]}) {
			l.ClaimsLost.Add(1) // other nodes read them from the log
			return
		}
		list = list[n:]
	}
}

// Revoke publishes a revocation. It returns the nodes that have written it to disk.
func (p *Peers) Revoke(ctx context.Context, r registry.Revocation) (nodes []string) {
	p.request(ctx, verbRevoke, registryMessage{Revocation: &r}, func(m registryMessage) { nodes = append(nodes, m.Node) })
	return nodes
}

// Query requests the changes of other nodes after a position. If NATS is not connected,
// as during startup, it waits until ctx ends.
func (p *Peers) Query(ctx context.Context, at devices.Position) (answers []registry.PeerAnswer) {
	for !p.link.opt.SingleNode && !p.link.opt.IsConnected() {
		if !clock.Sleep(ctx, upPause) {
			return nil
		}
	}
	p.request(ctx, verbAsk, registryMessage{At: &at}, func(m registryMessage) {
		if m.Answer != nil {
			answers = append(answers, *m.Answer)
		}
	})
	return answers
}

// request publishes a message and handles the answers that arrive until ctx ends, or
// until peerSettle after the first.
func (p *Peers) request(ctx context.Context, verb string, m registryMessage, take func(registryMessage)) {
	inbox := p.link.openInbox()
	if inbox == nil {
		return
	}
	defer func() { _ = inbox.Unsubscribe() }() // fails only with the connection
	m.Reply = inbox.Subject
	if !p.send(verb, m) {
		return
	}
	for {
		var answer registryMessage
		if !p.link.nextAnswer(ctx, inbox, verbReply, &answer) {
			return
		}
		take(answer)
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, peerSettle)
		defer cancel()
	}
}

// onMessage handles a message of another node.
func (p *Peers) onMessage(verb string, msg *nats.Msg) {
	l := p.link
	var m registryMessage
	if err := json.Unmarshal(msg.Data, &m); err != nil || m.Node == l.opt.Node || !l.acceptOnce(msg, verb, "") {
		return
	}
	l.Requests.Add(verb, 1)
	r := p.registry.Load()
	switch {
	case verb == verbChanges:
		r.Offer(m.Changes)
	case verb == verbRevoke && m.Revocation != nil:
		l.run(func() { // writes to disk
			if err := r.AddRevocation(*m.Revocation); err != nil {
				l.opt.Log.Error("a revocation of another node is in force but not on disk; a restart of this node may lose it", "device", m.Revocation.Device, "key", m.Revocation.Key, "error", err)
				return
			}
			p.reply(m.Reply, registryMessage{})
		})
	case verb == verbAsk && m.At != nil && r.Ready():
		l.run(func() {
			answer := r.Answer(*m.At)
			n, size := 0, 0
			for ; n < len(answer.Changes) && size < maxChanges; n++ {
				size += len(answer.Changes[n].Value) + 256
			}
			answer.Complete = answer.Complete && n == len(answer.Changes)
			answer.Changes = answer.Changes[:n]
			p.reply(m.Reply, registryMessage{Answer: &answer})
		})
	}
}

// run starts a task that Close waits for.
func (l *Link) run(task func()) {
	l.tasks.Go(func() {
		defer tasks.Contain(l.opt.Log, nil)
		task()
	})
}

// reply answers on the inbox that the request names.
func (p *Peers) reply(inbox string, m registryMessage) {
	m.Node = p.link.opt.Node
	if err := p.link.sendAnswer(inbox, verbReply, m); err != nil {
		p.link.opt.Log.Debug("answer to another node not sent", "error", err)
	}
}
