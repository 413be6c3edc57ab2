package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/nats-io/nats.go"
	"golang.org/x/time/rate"

	"fleetd/internal/access"
	"fleetd/internal/devices"
)

// Claims and news are broadcast to every node. Each carries a stamp like a hop. Its
// number comes from a counter of its own. In place of the nonce of one holder it
// has the nonces of all nodes that the sender has learned. A receiver accepts each
// number of a sender once; the first message of a sender only if it contains the
// receiver's nonce. A node announces its nonce when it starts, when NATS is
// reconnected, to a node that is new to it, and when it refuses a message without
// it. Repeating an announcement is harmless.
const (
	// maxPeers is how many nonces a stamp contains; the oldest are dropped.
	maxPeers = 64
	// announceRate and announceBurst limit the announcements that other nodes cause.
	announceRate  = 1 // per second
	announceBurst = 20
)

// peers holds the nonces of other nodes.
type peers struct {
	limit *rate.Limiter

	mu     sync.Mutex
	nonces []string // newest last
}

// has reports whether a nonce is known.
func (p *peers) has(nonce string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Contains(p.nonces, nonce)
}

func (p *peers) add(nonce string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.nonces = append(p.nonces, nonce)
	p.nonces = p.nonces[max(0, len(p.nonces)-maxPeers):]
}

// list returns the nonces for a stamp, separated by commas.
func (p *peers) list() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.nonces) == 0 {
		return noNonce
	}
	return strings.Join(p.nonces, ",")
}

// nodeSubject returns the subject of a node's broadcasts with this verb; "*": of every node.
func (l *Link) nodeSubject(verb, node string) string { return l.opt.Prefix + "." + verb + "." + node }

// broadcast signs a message and publishes it to every other node. It reports whether NATS
// accepted it.
func (l *Link) broadcast(verb string, m any) bool {
	return l.broadcastOn(l.nodeSubject(verb, l.opt.Node), verb, "", m)
}

func (l *Link) broadcastOn(subject, verb string, id devices.ID, m any) bool {
	if l.opt.SingleNode || !l.opt.IsConnected() {
		return false
	}
	body, err := json.Marshal(m)
	if err != nil {
		l.opt.Log.Error("a message to other nodes cannot be encoded", "verb", verb, "error", err)
		return false
	}
	from := l.nonce + "." + strconv.FormatUint(l.sent.Add(1), 36)
	return l.opt.Conn.PublishMsg(&nats.Msg{Subject: subject, Data: body, Header: nats.Header{HeaderStamp: []string{l.stamp(id, verb, l.peers.list(), from, "", body)}}}) == nil
}

// verifyBroadcast reports whether another node signed a broadcast, and returns the
// nonces and the sender in its stamp.
func (l *Link) verifyBroadcast(msg *nats.Msg, verb string, id devices.ID) (list, from string, ok bool) {
	list, rest, _ := strings.Cut(msg.Header.Get(HeaderStamp), " ")
	from, signature, _ := strings.Cut(rest, " ")
	return list, from, l.opt.Mint.IsHop(signature, string(id), stampKind+verb, stamped(list, from, "", msg.Data))
}

// acceptOnce reports whether another node signed the broadcast and this node has
// not accepted it before. Otherwise it counts a refusal.
func (l *Link) acceptOnce(msg *nats.Msg, verb string, id devices.ID) bool {
	list, from, ok := l.verifyBroadcast(msg, verb, id)
	var err error
	if ok {
		err = l.replays.accept(from, slices.Contains(strings.Split(list, ","), l.nonce))
	} else {
		err = access.ErrToken
	}
	if err == nil {
		return true
	}
	l.Refused.Add(devices.CodeUnauthorized, 1)
	if errors.Is(err, errNonceRequired) && l.peers.limit.Allow() { // a claim that is lost here is repeated within a minute
		l.announceNonce()
	}
	return false
}

// announceNonce sends the nonce of this process to every node.
func (l *Link) announceNonce() { l.broadcast(verbNews, newsMessage{Node: l.opt.Node, Nonce: l.nonce}) }

// onNonce records an announced nonce. It replies to a new node with this node's
// nonce, and repeats the news that the new node has missed or had to refuse.
func (l *Link) onNonce(nonce string) {
	if l.peers.has(nonce) {
		return
	}
	answer := l.peers.limit.Allow()
	if answer {
		l.announceNonce()
	}
	l.peers.add(nonce)
	if answer {
		l.service.Load().RepeatNews()
	}
}

// openInbox subscribes to answers of other nodes to a broadcast; nil if no node can answer.
func (l *Link) openInbox() *nats.Subscription {
	if l.opt.SingleNode || !l.opt.IsConnected() {
		return nil
	}
	inbox, err := l.opt.Conn.SubscribeSync(l.opt.Conn.NewInbox())
	if err != nil {
		l.opt.Log.Warn("cannot subscribe to answers of other nodes", "error", err)
		return nil
	}
	return inbox
}

// nextAnswer decodes the next answer of another node into m. It reports false if ctx ended first.
func (l *Link) nextAnswer(ctx context.Context, inbox *nats.Subscription, verb string, m any) bool {
	for {
		msg, err := inbox.NextMsgWithContext(ctx)
		if err != nil {
			return false
		}
		if l.opt.Mint.IsHop(msg.Header.Get(HeaderStamp), "", stampKind+verb, stamped("", inbox.Subject, "", msg.Data)) && json.Unmarshal(msg.Data, m) == nil {
			return true
		}
		l.Refused.Add(devices.CodeUnauthorized, 1)
	}
}

// sendAnswer signs an answer to a broadcast, and sends it to the inbox that the signed
// broadcast names: a sender of a recorded message gets no answer.
func (l *Link) sendAnswer(inbox, verb string, m any) error {
	body, err := json.Marshal(m)
	if err != nil {
		return err
	}
	stamp := l.opt.Mint.HopSignature("", stampKind+verb, stamped("", inbox, "", body))
	err = l.opt.Conn.PublishMsg(&nats.Msg{Subject: inbox, Data: body, Header: nats.Header{HeaderStamp: []string{stamp}}})
	if errors.Is(err, nats.ErrMaxPayload) {
		return fmt.Errorf("%w: %d bytes", err, len(body))
	}
	return err
}
