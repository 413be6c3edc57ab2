package cluster

import (
	"encoding/json"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/devices"
	"fleetd/internal/jsonspan"
	"fleetd/internal/tasks"
)

// claimMessage is a claim on the wire, on `<prefix>.claims.<node>`, stamped like a
// hop. The subject lets a node pass over its own without a look at them: there
// is one for every connection.
type claimMessage struct {
	Kind         devices.ClaimKind `json:"kind"`
	Device       devices.ID        `json:"device"`
	Node         string            `json:"node"`
	Epoch        devices.Epoch     `json:"epoch"`
	Conversation string            `json:"conversation,omitempty"`
	Generation   int64             `json:"generation,omitempty"`
}

const (
	verbClaim = "claim"
	verbNews  = "news"
)

func (l *Link) claims(node string) string { return l.opt.Prefix + ".claims." + node }

func (l *Link) news(node string) string { return l.opt.Prefix + ".news." + node }

// Claim tells every other node. NATS away loses the claim; Service.Reassert
// makes it good.
func (l *Link) Claim(c devices.Claim) {
	if l.opt.Alone {
		return
	}
	if !l.opt.Up() {
		l.ClaimsLost.Add(1)
		return
	}
	if err := l.broadcast(l.claims(l.opt.Node), verbClaim, c.Device, appendClaim(make([]byte, 0, 192), c)); err != nil {
		l.ClaimsLost.Add(1)
	}
}

// Remind tells whoever else holds the device, on the device's own subject: nobody
// else is disturbed by what is said once a minute for each device. The
// connection must not echo (nats.NoEcho), or the server may choose this node for
// the one that hears it. A node of an older version that holds the device does not
// understand it; its own claims, to all, are answered here.
func (l *Link) Remind(c devices.Claim) {
	if l.opt.Alone || !l.opt.Up() {
		return
	}
	// What is lost is said again within a minute.
	_ = l.broadcast(l.subject(c.Device, verbClaim), verbClaim, c.Device, appendClaim(make([]byte, 0, 192), c))
}

func appendClaim(dst []byte, c devices.Claim) []byte {
	dst = jsonspan.AppendString(append(dst, `{"kind":`...), string(c.Kind))
	dst = jsonspan.AppendString(append(dst, `,"device":`...), string(c.Device))
	dst = jsonspan.AppendString(append(dst, `,"node":`...), c.Node)
	dst = strconv.AppendInt(append(dst, `,"epoch":`...), int64(c.Epoch), 10)
	if c.Conversation != "" {
		dst = jsonspan.AppendString(append(dst, `,"conversation":`...), c.Conversation)
	}
	if c.Generation != 0 {
		dst = strconv.AppendInt(append(dst, `,"generation":`...), c.Generation, 10)
	}
	return append(dst, '}')
}

// claimed takes a claim.
func (l *Link) claimed(msg *nats.Msg) {
	if msg.Subject == l.ownClaims {
		return
	}
	defer tasks.Contain(l.opt.Log, nil)
	var c claimMessage
	if err := json.Unmarshal(msg.Data, &c); err != nil || c.Node == l.opt.Node {
		return
	}
	if !l.isFirst(msg, verbClaim, c.Device) {
		return
	}
	l.Requests.Add(verbClaim, 1)
	l.service.Load().Claimed(devices.Claim{Device: c.Device, Kind: c.Kind, Node: c.Node, Epoch: c.Epoch, Conversation: c.Conversation, Generation: c.Generation})
}

// newsMessage is news on the wire, on `<prefix>.news.<node>`, or the announcement
// of a node's nonce.
type newsMessage struct {
	Node  string `json:"node"`
	Nonce string `json:"nonce,omitempty"` // of the node's start; then there is nothing else
	devices.News
}

// News that is lost is made good: what this node told within retell before it
// lost NATS, and while it was away, is told again when it is back. A node that
// was away itself reads the database.
const (
	retell  = 30 * time.Second // longer than a connection can be dead unnoticed
	maxTold = 10_000           // beyond that the oldest are given up, and counted
)

// told is news on its way.
type told struct {
	news devices.News
	at   time.Time
	sent bool
}

// Tell passes news on to every other node.
func (l *Link) Tell(n devices.News) {
	if l.opt.Alone {
		return
	}
	l.newsMu.Lock()
	defer l.newsMu.Unlock()
	old := 0
	for old < len(l.told) && (l.told[old].sent && time.Since(l.told[old].at) > retell || len(l.told)-old >= maxTold) {
		if !l.told[old].sent {
			l.ClaimsLost.Add(1)
		}
		old++
	}
	l.told = append(l.told[old:], told{news: n, at: time.Now(), sent: l.opt.Up() && l.publishNews(newsMessage{Node: l.opt.Node, News: n})})
}

// tellAgain is Tell for what other nodes may have missed: what was not sent yet,
// and what was within this time.
func (l *Link) tellAgain(within time.Duration) {
	l.newsMu.Lock()
	defer l.newsMu.Unlock()
	for i := range l.told {
		t := &l.told[i]
		if t.sent && time.Since(t.at) > within {
			continue
		}
		if l.publishNews(newsMessage{Node: l.opt.Node, News: t.news}) {
			t.at, t.sent = time.Now(), true
		}
	}
}

// publishNews sends one piece; false if NATS does not take it.
func (l *Link) publishNews(n newsMessage) bool {
	body, err := json.Marshal(n)
	if err != nil {
		l.opt.Log.Error("news", "error", err)
		return true // it will never be better
	}
	return l.broadcast(l.news(l.opt.Node), verbNews, "", body) == nil
}

// learn takes another node's news.
func (l *Link) learn(msg *nats.Msg) {
	defer tasks.Contain(l.opt.Log, nil)
	var n newsMessage
	if err := json.Unmarshal(msg.Data, &n); err != nil || n.Node == l.opt.Node {
		return
	}
	if n.Nonce != "" {
		if _, _, ok := l.signed(msg, verbNews, ""); ok {
			l.takeNonce(n.Nonce)
		}
		return
	}
	if !l.isFirst(msg, verbNews, "") {
		return
	}
	l.Requests.Add(verbNews, 1)
	l.service.Load().Learn(n.News)
}
