package cluster

import (
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/nats-io/nats.go"
	"golang.org/x/time/rate"

	"fleetd/internal/access"
	"fleetd/internal/devices"
)

// Claims and news go to every node at once. They carry a stamp as hops do, with a
// number of their own count and, in place of one holder's nonce, those of all
// nodes that the sender knows: a node takes from a sender that it does not know
// yet only what names its own start, and from one that it knows each number once.
// A node announces its nonce when it starts, when NATS is back, to a node that it
// did not know, and when it has to refuse what does not name it. To repeat an
// announcement is harmless.
const (
	// maxPeers bounds the nonces that a stamp names, the latest first known.
	maxPeers = 64
	// announceRate and announceBurst bound the announcements that others cause.
	announceRate  = 1 // per second
	announceBurst = 20
)

// peers are the nonces of other nodes.
type peers struct {
	limit *rate.Limiter

	mu     sync.Mutex
	nonces []string // the latest last
}

// has tells whether a nonce is known.
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

// list is what a stamp has in place of one nonce.
func (p *peers) list() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.nonces) == 0 {
		return noNonce
	}
	return strings.Join(p.nonces, ",")
}

// broadcast signs and sends what every node is to take once.
func (l *Link) broadcast(subject, verb string, id devices.ID, body []byte) error {
	from := l.nonce + "." + strconv.FormatUint(l.sent.Add(1), 36)
	msg := &nats.Msg{Subject: subject, Data: body, Header: nats.Header{HeaderStamp: []string{l.stamp(id, verb, l.peers.list(), from, "", body)}}}
	if !l.opt.StampedAll() { // for nodes of an older version
		msg.Header[HeaderHop] = []string{l.opt.Mint.HopSignature(string(id), verb, body)}
	}
	return l.opt.Conn.PublishMsg(msg)
}

// signed tells whether a broadcast is another node's; stamp is empty if it has
// none, as those of older versions.
func (l *Link) signed(msg *nats.Msg, verb string, id devices.ID) (list, from string, ok bool) {
	stamp := msg.Header.Get(HeaderStamp)
	if stamp == "" {
		return "", "", !l.opt.StampedAll() && l.opt.Mint.IsHop(msg.Header.Get(HeaderHop), string(id), verb, msg.Data)
	}
	list, rest, _ := strings.Cut(stamp, " ")
	from, signature, _ := strings.Cut(rest, " ")
	return list, from, l.opt.Mint.IsHop(signature, string(id), stampKind+verb, stamped(list, from, "", msg.Data))
}

// isFirst tells whether a broadcast is another node's and comes for the first
// time; else it is refused.
func (l *Link) isFirst(msg *nats.Msg, verb string, id devices.ID) bool {
	list, from, ok := l.signed(msg, verb, id)
	var err error
	switch {
	case !ok:
		err = access.ErrToken
	case from != "":
		err = l.taken.take(from, slices.Contains(strings.Split(list, ","), l.nonce))
	}
	if err == nil {
		return true
	}
	l.Refused.Add(devices.CodeUnauthorized, 1)
	if errors.Is(err, errAgain) && l.peers.limit.Allow() { // a claim that was lost so is made again within a minute
		l.announceNonce()
	}
	return false
}

// announceNonce tells every node of this one's start.
func (l *Link) announceNonce() {
	if !l.opt.Alone && l.opt.Up() {
		l.publishNews(newsMessage{Node: l.opt.Node, Nonce: l.nonce})
	}
}

// takeNonce takes an announcement. A node that was not known gets this one's in
// return, and the news that it had to refuse.
func (l *Link) takeNonce(nonce string) {
	if l.peers.has(nonce) {
		return
	}
	answer := l.peers.limit.Allow()
	if answer {
		l.announceNonce()
	}
	l.peers.add(nonce)
	if answer {
		l.tellAgain(retell)
	}
}
