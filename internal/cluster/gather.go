package cluster

import (
	"context"
	"encoding/json"
	"slices"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/tasks"
)

// A gather is one question to all other nodes. It is published on `<prefix>.gather.<node>` with the name of the asking
// node, and stamped like a claim. Each node answers on the inbox that the signed body names.
const (
	verbGather       = "gather"
	verbGatherAnswer = "gathered"
)

const (
	// gatherTime is how long Gather waits for answers. Tests do not shorten it, since a busy machine answers no faster
	// in them.
	gatherTime = time.Second
	// gatherAgain is after how long the question is sent once more if answers are missing: a node
	// refuses the first message of a sender that does not know its nonce yet.
	gatherAgain = gatherTime / 3
)

// gatherMessage is the wire form of a question and of an answer.
type gatherMessage struct {
	Node     string          `json:"node"`
	Kind     string          `json:"kind,omitempty"`
	Reply    string          `json:"reply,omitempty"`
	Question json.RawMessage `json:"question,omitempty"`
	// Answer is base64 in JSON: it may be compressed.
	Answer []byte `json:"answer,omitempty"`
}

// gatherAnswer answers a question of another node.
type gatherAnswer func(ctx context.Context, question []byte) ([]byte, error)

// OnGather registers the function that answers questions of a kind from other nodes. Each call runs on a goroutine of
// its own. An answer may have 700 KiB.
func (l *Link) OnGather(kind string, answer func(ctx context.Context, question []byte) ([]byte, error)) {
	l.gathers.Store(kind, gatherAnswer(answer))
}

// Gather sends a question of a kind to all other nodes. It returns the answers of the named nodes by node, and, in order
// of name, those named nodes that did not answer within a second. It ignores this node's own name. The question is JSON.
func (l *Link) Gather(ctx context.Context, kind string, question []byte, nodes []string) (answers map[string][]byte, missing []string) {
	answers = map[string][]byte{}
	for _, node := range nodes {
		if node != l.opt.Node && !slices.Contains(missing, node) {
			missing = append(missing, node)
		}
	}
	slices.Sort(missing)
	if len(missing) == 0 {
		return answers, missing
	}
	inbox := l.openInbox()
	if inbox == nil {
		return answers, missing
	}
	defer func() { _ = inbox.Unsubscribe() }() // fails only with the connection
	ctx, cancel := context.WithTimeout(ctx, gatherTime)
	defer cancel()
	for attempt := 0; attempt < 2 && len(missing) > 0; attempt++ {
		if !l.broadcast(verbGather, gatherMessage{Node: l.opt.Node, Kind: kind, Reply: inbox.Subject, Question: question}) {
			return answers, missing
		}
		until, done := ctx, context.CancelFunc(func() {})
		if attempt == 0 {
			until, done = context.WithTimeout(ctx, gatherAgain)
		}
		missing = l.collectAnswers(until, inbox, answers, missing)
		done()
	}
	return answers, missing
}

// collectAnswers reads answers until none is missing or ctx ends.
func (l *Link) collectAnswers(ctx context.Context, inbox *nats.Subscription, answers map[string][]byte, missing []string) []string {
	for len(missing) > 0 {
		var m gatherMessage
		if !l.nextAnswer(ctx, inbox, verbGatherAnswer, &m) {
			return missing
		}
		if i := slices.Index(missing, m.Node); i >= 0 {
			answers[m.Node] = m.Answer
			missing = slices.Delete(missing, i, i+1)
		}
	}
	return missing
}

// onGather answers another node's question.
func (l *Link) onGather(msg *nats.Msg) {
	defer tasks.Contain(l.opt.Log, nil)
	var m gatherMessage
	if err := json.Unmarshal(msg.Data, &m); err != nil || m.Node == l.opt.Node || !l.acceptOnce(msg, verbGather, "") {
		return
	}
	l.Requests.Add(verbGather, 1)
	answer, known := l.gathers.Load(m.Kind)
	if !known { // the other node has a newer version, or this node is still starting
		return
	}
	l.run(func() {
		ctx, cancel := context.WithTimeout(l.ctx, gatherTime)
		defer cancel()
		text, err := answer.(gatherAnswer)(ctx, m.Question)
		if err == nil {
			err = l.sendAnswer(m.Reply, verbGatherAnswer, gatherMessage{Node: l.opt.Node, Answer: text})
		}
		if err != nil {
			l.opt.Log.Warn("a question of another node was not answered", "kind", m.Kind, "from", m.Node, "error", err)
		}
	})
}
