package cluster

import (
	"encoding/json"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/devices"
	"fleetd/internal/tasks"
)

const (
	verbClaim = "claim"
	verbNews  = "news"
)

func (l *Link) claimsSubject(node string) string { return l.opt.Prefix + ".claims." + node }

func (l *Link) newsSubject(node string) string { return l.opt.Prefix + ".news." + node }

// Claim sends a claim to every other node, on `<prefix>.claims.<node>`: the subject lets a node skip its own
// without parsing them. It is lost while NATS is unreachable;
// Service.Reassert repeats it.
func (l *Link) Claim(c devices.Claim) {
	if l.opt.SingleNode {
		return
	}
	if !l.opt.IsConnected() {
		l.ClaimsLost.Add(1)
		return
	}
	if err := l.broadcast(l.claimsSubject(l.opt.Node), verbClaim, c.Device, encodeClaim(c)); err != nil {
		l.ClaimsLost.Add(1)
	}
}

// Remind sends a claim on the device's own subject: it reaches another holder of
// the device, and no other node has to process the one that is sent each minute for
// each device. The connection must not echo (nats.NoEcho), or the server may deliver
// it to this node alone.
func (l *Link) Remind(c devices.Claim) {
	if l.opt.SingleNode || !l.opt.IsConnected() {
		return
	}
	// A lost reminder is repeated within a minute.
	_ = l.broadcast(l.subject(c.Device, verbClaim), verbClaim, c.Device, encodeClaim(c))
}

func encodeClaim(c devices.Claim) []byte {
	body, _ := json.Marshal(c) // cannot fail: it consists of strings and numbers
	return body
}

// onClaim handles a claim of another node.
func (l *Link) onClaim(msg *nats.Msg) {
	if msg.Subject == l.ownClaims {
		return
	}
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

// News that may be lost are repeated after NATS has reconnected: those published
// within resendWindow before the connection was lost, and those from the outage. A
// node that was itself disconnected reads the database.
const (
	resendWindow  = 30 * time.Second // longer than a dead connection stays undetected
	maxRecentNews = 10_000           // beyond that the oldest are dropped, and counted
)

// recentNews is news that may have to be repeated.
type recentNews struct {
	news devices.News
	at   time.Time
	sent bool
}

// PublishNews publishes news to every other node.
func (l *Link) PublishNews(n devices.News) {
	if l.opt.SingleNode {
		return
	}
	l.newsMu.Lock()
	defer l.newsMu.Unlock()
	old := 0
	for old < len(l.recent) && (l.recent[old].sent && time.Since(l.recent[old].at) > resendWindow || len(l.recent)-old >= maxRecentNews) {
		if !l.recent[old].sent {
			l.ClaimsLost.Add(1)
		}
		old++
	}
	l.recent = append(l.recent[old:], recentNews{news: n, at: time.Now(), sent: l.opt.IsConnected() && l.publishNews(newsMessage{Node: l.opt.Node, News: n})})
}

// resendNews publishes the news again that other nodes may have missed: unsent
// news, and those sent at most within ago.
func (l *Link) resendNews(within time.Duration) {
	l.newsMu.Lock()
	defer l.newsMu.Unlock()
	for i := range l.recent {
		t := &l.recent[i]
		if t.sent && time.Since(t.at) > within {
			continue
		}
		if l.publishNews(newsMessage{Node: l.opt.Node, News: t.news}) {
			t.at, t.sent = time.Now(), true
		}
	}
}

// publishNews sends one piece of news. It reports whether NATS accepted it.
func (l *Link) publishNews(n newsMessage) bool {
	body, err := json.Marshal(n)
	if err != nil {
		l.opt.Log.Error("news cannot be encoded", "error", err)
		return true // a retry would fail as well
	}
	return l.broadcast(l.newsSubject(l.opt.Node), verbNews, "", body) == nil
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
