package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
	"fleetd/internal/tasks"
)

// Subjects of the registry, each with the name of the sending node behind it.
// Changes are told to all, once they are committed; what is lost is read from the
// log. A revocation that the database did not take, and the question what others
// know, are answered on an inbox which the signed body names: somebody who repeats
// a message gets no answer.
const (
	verbChanges = "changes"
	verbRevoke  = "revoke"
	verbAsk     = "ask"
	verbReply   = "reply"
)

const (
	// maxChanges bounds the changes of one message, in bytes: NATS takes 1 MiB.
	maxChanges = 512 << 10
	// upPause is the pause between two looks whether NATS is reached.
	upPause = 50 * time.Millisecond
	// peerSettle is how long the answers of further nodes are waited for after the
	// first.
	peerSettle = 300 * time.Millisecond
)

// registryMessage is what nodes send each other about the registry.
type registryMessage struct {
	Node       string               `json:"node"`
	Reply      string               `json:"reply,omitempty"` // inbox for the answer
	Changes    []devices.Change     `json:"changes,omitempty"`
	Revocation *registry.Revocation `json:"revocation,omitempty"`
	At         *devices.Position    `json:"at,omitempty"`
	Answer     *registry.PeerAnswer `json:"answer,omitempty"`
}

// Peers are the other nodes, as the registry asks and tells them.
type Peers struct {
	link     *Link
	registry atomic.Pointer[registry.Registry]
}

// Peers returns the way to the other nodes.
func (l *Link) Peers() *Peers { return &Peers{link: l} }

func (l *Link) registrySubject(verb, node string) string {
	return l.opt.Prefix + "." + verb + "." + node
}

// Follow has the registry follow what other nodes tell. Call it once.
func (p *Peers) Follow(r *registry.Registry) error {
	l := p.link
	if l.opt.Alone {
		return nil
	}
	p.registry.Store(r)
	var errs []error
	for _, verb := range []string{verbChanges, verbRevoke, verbAsk} {
		_, err := l.opt.Conn.Subscribe(l.registrySubject(verb, "*"), func(msg *nats.Msg) { p.told(verb, msg) })
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// sendRegistry signs and sends a message to all other nodes; false if NATS does
// not take it.
func (p *Peers) send(verb string, m registryMessage) bool {
	l := p.link
	m.Node = l.opt.Node
	body, err := json.Marshal(m)
	if err != nil {
		l.opt.Log.Error("a message to other nodes cannot be encoded", "verb", verb, "error", err)
		return false
	}
	return l.opt.Up() && l.broadcast(l.registrySubject(verb, l.opt.Node), verb, "", body) == nil
}

// Tell sends changes that were committed here.
func (p *Peers) Tell(list []devices.Change) {
	l := p.link
	if l.opt.Alone {
		return
	}
	for len(list) > 0 {
		n, size := 0, 0
		for ; n < len(list) && (n == 0 || size+len(list[n].Value) < maxChanges); n++ {
			size += len(list[n].Value) + 256
		}
		if !p.send(verbChanges, registryMessage{Changes: list[:n]}) {
			l.ClaimsLost.Add(1) // they are read from the log
			return
		}
		list = list[n:]
	}
}

// Revoke sends a revocation, and returns who has written it down.
func (p *Peers) Revoke(ctx context.Context, r registry.Revocation) (nodes []string) {
	p.request(ctx, verbRevoke, registryMessage{Revocation: &r}, func(m registryMessage) { nodes = append(nodes, m.Node) })
	return nodes
}

// Ask asks what other nodes know beyond a position. A node that starts may not have
// reached NATS yet: it waits for that until ctx ends.
func (p *Peers) Ask(ctx context.Context, at devices.Position) (answers []registry.PeerAnswer) {
	for !p.link.opt.Alone && !p.link.opt.Up() {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(upPause):
		}
	}
	p.request(ctx, verbAsk, registryMessage{At: &at}, func(m registryMessage) {
		if m.Answer != nil {
			answers = append(answers, *m.Answer)
		}
	})
	return answers
}

// request sends a message and takes the answers that come until ctx ends, or
// peerSettle after the first.
func (p *Peers) request(ctx context.Context, verb string, m registryMessage, take func(registryMessage)) {
	l := p.link
	if l.opt.Alone || !l.opt.Up() {
		return
	}
	inbox, err := l.opt.Conn.SubscribeSync(l.opt.Conn.NewInbox())
	if err != nil {
		l.opt.Log.Warn("other nodes cannot be asked", "error", err)
		return
	}
	defer func() { _ = inbox.Unsubscribe() }() // fails at most with the connection
	m.Reply = inbox.Subject
	if !p.send(verb, m) {
		return
	}
	for {
		msg, err := inbox.NextMsgWithContext(ctx)
		if err != nil {
			return
		}
		var answer registryMessage
		if !l.opt.Mint.IsHop(msg.Header.Get(HeaderStamp), "", stampKind+verbReply, stamped("", inbox.Subject, "", msg.Data)) || json.Unmarshal(msg.Data, &answer) != nil {
			l.Refused.Add(devices.CodeUnauthorized, 1)
			continue
		}
		take(answer)
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, peerSettle)
		defer cancel()
	}
}

// registryTold takes a message of another node.
func (p *Peers) told(verb string, msg *nats.Msg) {
	l := p.link
	if msg.Subject == l.registrySubject(verb, l.opt.Node) {
		return
	}
	var m registryMessage
	if err := json.Unmarshal(msg.Data, &m); err != nil || m.Node == l.opt.Node || !l.isFirst(msg, verb, "") {
		return
	}
	l.Requests.Add(verb, 1)
	r := p.registry.Load()
	switch {
	case verb == verbChanges:
		r.Offer(m.Changes)
	case verb == verbRevoke && m.Revocation != nil:
		l.run(func() { // it waits for the disk
			if err := r.Confirm(*m.Revocation); err != nil {
				l.opt.Log.Error("a revocation of another node is in force and not on disk", "device", m.Revocation.Device, "key", m.Revocation.Key, "error", err)
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
			answer.Whole = answer.Whole && n == len(answer.Changes)
			answer.Changes = answer.Changes[:n]
			p.reply(m.Reply, registryMessage{Answer: &answer})
		})
	}
}

// run runs a task that Close waits for.
func (l *Link) run(task func()) {
	l.tasks.Go(func() {
		defer tasks.Contain(l.opt.Log, nil)
		task()
	})
}

// reply answers on the inbox that the request named.
func (p *Peers) reply(inbox string, m registryMessage) {
	l := p.link
	m.Node = l.opt.Node
	body, err := json.Marshal(m)
	if err != nil {
		l.opt.Log.Error("an answer to another node cannot be encoded", "error", err)
		return
	}
	stamp := l.opt.Mint.HopSignature("", stampKind+verbReply, stamped("", inbox, "", body))
	if err := l.opt.Conn.PublishMsg(&nats.Msg{Subject: inbox, Data: body, Header: nats.Header{HeaderStamp: []string{stamp}}}); err != nil {
		l.opt.Log.Debug("another node is not answered", "error", err)
	}
}
