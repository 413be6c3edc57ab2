package vision

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
)

// responder is the explainer that responds on a NATS subject.
type responder struct {
	conn    *nats.Conn
	subject string
	bucket  string
}

// request is the payload of a question on NATS. It contains no picture: the responder reads
// it from the object store, or over REST.
type request struct {
	Device   string `json:"device"`
	Photo    string `json:"photo"`
	Question string `json:"question"`
	Bytes    int64  `json:"bytes"`
	SHA256   string `json:"sha256"`
	// Store and Object identify the picture in JetStream's object store, Path in the REST
	// API.
	Store  string `json:"store"`
	Object string `json:"object"`
	Path   string `json:"path"`
	// TimeoutMS is how long fleetd waits for the reply.
	TimeoutMS int64 `json:"timeout_ms"`
}

// reply is the payload of a reply on NATS, with one of the members.
type reply struct {
	Text  string `json:"text"`
	Error string `json:"error"`
}

func (r *responder) explain(ctx context.Context, q question) (string, error) {
	ask := request{Device: string(q.device), Photo: q.photo, Question: q.text, Bytes: q.bytes, SHA256: q.sha256,
		Store: r.bucket, Object: q.photo, Path: "/v1/photos/" + q.photo}
	if deadline, ok := ctx.Deadline(); ok {
		ask.TimeoutMS = time.Until(deadline).Milliseconds()
	}
	body, err := json.Marshal(ask)
	if err != nil {
		return "", fmt.Errorf("encode the question: %w", err)
	}
	msg, err := r.conn.RequestWithContext(ctx, r.subject, body)
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		return "", errNoExplainer
	case err != nil:
		return "", fmt.Errorf("request to %s: %w", r.subject, err)
	case len(msg.Data) > maxReply:
		return "", fmt.Errorf("the reply on %s has more than %d bytes", r.subject, maxReply)
	}
	var answer reply
	if err := json.Unmarshal(msg.Data, &answer); err != nil {
		return "", fmt.Errorf("the reply on %s is not a JSON object with text or error", r.subject)
	}
	if answer.Error != "" {
		return "", fmt.Errorf("the service on %s: %.200q", r.subject, answer.Error)
	}
	return answer.Text, nil
}

// check always passes: a service may start at any time.
func (r *responder) check(context.Context) error { return nil }
