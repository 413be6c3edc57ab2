package cluster

import (
	"encoding/json"

	"github.com/nats-io/nats.go"

	"fleetd/internal/devices"
	"fleetd/internal/tasks"
)

const (
	verbClaim  = "claim"
	verbClaims = "claims" // in the subject of claims to every node
	verbNews   = "news"
)

// Claim sends a claim to every other node, on `<prefix>.claims.<node>`. It is lost while NATS is unreachable;
// Service.Reassert repeats it.
func (l *Link) Claim(c devices.Claim) {
	if !l.broadcastOn(l.nodeSubject(verbClaims, l.opt.Node), verbClaim, c.Device, c) && !l.opt.SingleNode {
		l.ClaimsLost.Add(1)
	}
}

// Remind sends a claim on the device's own subject: it reaches another holder of
// the device, and no other node has to process the one that is sent each minute for
// each device. The connection must not echo (nats.NoEcho), or the server may deliver
// it to this node alone. A lost reminder is repeated within a minute.
func (l *Link) Remind(c devices.Claim) {
	l.broadcastOn(l.subject(c.Device, verbClaim), verbClaim, c.Device, c)
}

// onClaim handles a claim of another node.
func (l *Link) onClaim(msg *nats.Msg) {
	defer tasks.Contain(l.opt.Log, nil)
	var c devices.Claim
	if err := json.Unmarshal(msg.Data, &c); err != nil || c.Node == l.opt.Node {
		return
	}
	if !l.acceptOnce(msg, verbClaim, c.Device) {
		return
	}
	l.Requests.Add(verbClaim, 1)
	l.service.Load().OnClaim(c)
}

// newsMessage is the wire form of news, on `<prefix>.news.<node>`, or announces a
// node's nonce.
type newsMessage struct {
	Node  string `json:"node"`
	Nonce string `json:"nonce,omitempty"` // of this process; then there are no news
	devices.News
}

// PublishNews publishes news to every other node. Lost news are repeated when NATS is back.
func (l *Link) PublishNews(n devices.News) {
	if !l.broadcast(verbNews, newsMessage{Node: l.opt.Node, News: n}) && !l.opt.SingleNode {
		l.ClaimsLost.Add(1)
	}
}

// onNews handles another node's news.
func (l *Link) onNews(msg *nats.Msg) {
	defer tasks.Contain(l.opt.Log, nil)
	var n newsMessage
	if err := json.Unmarshal(msg.Data, &n); err != nil || n.Node == l.opt.Node {
		return
	}
	if n.Nonce != "" {
		if _, _, ok := l.verifyBroadcast(msg, verbNews, ""); ok {
			l.onNonce(n.Nonce)
		}
		return
	}
	if !l.acceptOnce(msg, verbNews, "") {
		return
	}
	l.Requests.Add(verbNews, 1)
	l.service.Load().OnNews(n.News)
}
