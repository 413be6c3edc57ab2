package vision

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"fleetd/internal/cleantext"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
)

// Limits of explanations. The device waits 30 s for the header of the response, from its
// last byte (http_client.h), and hangs on a response of 8 KiB.
const (
	ExplainTime   = 25 * time.Second // from the photo's last byte to the response, including the storing
	MaxExplaining = 16               // photos being explained at once
	MaxWaiting    = 64               // photos waiting to be explained; more are not explained
	maxText       = 5 << 10          // bytes of an explanation in JSON: the response stays below 6 KiB
	maxReply      = 256 << 10        // bytes read of an explainer's response
	explainWarn   = time.Minute      // between two log lines about explainers
)

// Outcomes of explanations. Each has a counter.
const (
	outcomeExplained = "explained"
	outcomeNone      = "none"   // no explainer responds
	outcomeLate      = "late"   // ExplainTime was over
	outcomeBusy      = "busy"   // MaxWaiting others are waiting
	outcomeFailed    = "failed" // the explainer refused, or its response is unusable
	outcomeGone      = "gone"   // the device disconnected, or the node is stopping
)

// lateMessage is the device's message when an explanation took too long.
const lateMessage = "The photo is stored, but its explanation did not arrive in time."

// question is the request to an explainer.
type question struct {
	device devices.ID
	photo  string
	text   string
	bytes  int64
	sha256 string
}

// explainer answers questions about photos. Its text is not trusted. errNoExplainer means that
// no explainer is available at the moment.
type explainer interface {
	explain(ctx context.Context, q question) (string, error)
	// check reports whether questions can be answered now.
	check(ctx context.Context) error
}

var errNoExplainer = errors.New("no service explains photos")

// explanations calls the explainer, for a limited number of photos at a time.
type explanations struct {
	explainer explainer // nil: photos are only stored
	slots     chan struct{}
	waiting   atomic.Int64
	warned    atomic.Int64 // unix nanoseconds
}

func newExplanations(ask explainer) *explanations {
	return &explanations{explainer: ask, slots: make(chan struct{}, MaxExplaining)}
}

// enter waits for a slot; "" means that it was taken and leave must be called.
func (e *explanations) enter(ctx context.Context) (outcome string) {
	select {
	case e.slots <- struct{}{}:
		return ""
	default:
	}
	defer e.waiting.Add(-1)
	if e.waiting.Add(1) > MaxWaiting {
		return outcomeBusy
	}
	select {
	case e.slots <- struct{}{}:
		return ""
	case <-ctx.Done():
		return outcomeOf(ctx, ctx.Err())
	}
}

func (e *explanations) leave() { <-e.slots }

func outcomeOf(ctx context.Context, err error) string {
	switch {
	case err == nil:
		return outcomeExplained
	case errors.Is(err, errNoExplainer):
		return outcomeNone
	case errors.Is(ctx.Err(), context.Canceled):
		return outcomeGone
	case isOver(ctx):
		return outcomeLate
	}
	return outcomeFailed
}

// isOver reports whether the deadline of a context has passed. Connections have the same deadline, and on a busy machine their
// error comes before that of the context.
func isOver(ctx context.Context) bool {
	deadline, limited := ctx.Deadline()
	return limited && !time.Now().Before(deadline)
}

// explainPhoto requests the explanation of a stored photo and returns it, or a message for the
// device instead. Other failures do not reach the device, because the photo is stored.
func (s *Server) explainPhoto(ctx context.Context, q question, deadline time.Time) (text, message string) {
	e := s.explanations
	if e.explainer == nil {
		return "", ""
	}
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	begun := time.Now()
	outcome := e.enter(ctx)
	if outcome == "" {
		var err error
		func() {
			defer e.leave()
			s.Explaining.Add(1)
			defer s.Explaining.Add(-1)
			text, err = e.explainer.explain(ctx, q)
		}()
		if text = cleanText(text); err == nil && text == "" {
			err = errors.New("the response contains no text")
		}
		if outcome = outcomeOf(ctx, err); outcome == outcomeFailed {
			s.warnOf(q, err)
		}
	}
	s.Explanations.Add(outcome, 1)
	if outcome != outcomeNone {
		s.ExplainTime.Observe(time.Since(begun))
	}
	switch outcome {
	case outcomeExplained:
		return text, ""
	case outcomeLate:
		return "", lateMessage
	}
	return "", ""
}

// warnOf logs a failure, at most once per explainWarn.
func (s *Server) warnOf(q question, err error) {
	now, last := clock.Reading(time.Now()), s.explanations.warned.Load()
	if now-last > int64(explainWarn) && s.explanations.warned.CompareAndSwap(last, now) {
		s.opt.Log.Warn("a photo was not explained", "device", q.device, "photo", q.photo, "error", err)
	}
}

// CheckExplainer returns why photos cannot be explained now. It returns nil if they can, or
// if no explainer is configured.
func (s *Server) CheckExplainer(ctx context.Context) error {
	if s.explanations.explainer == nil {
		return nil
	}
	return s.explanations.explainer.check(ctx)
}

// Close closes the explainer's idle connections. Call it after the last upload.
func (s *Server) Close() {
	if c, ok := s.explanations.explainer.(*chat); ok {
		c.client.CloseIdleConnections()
	}
}

// cleanText makes an explainer's text safe for a device, a language model and a terminal, and cuts it so that its JSON has at
// most maxText bytes.
func cleanText(text string) string {
	var b strings.Builder
	size := 0
	for _, r := range strings.ReplaceAll(cleantext.Lines(text), "\t", " ") {
		cost := utf8.RuneLen(r)
		if r == '"' || r == '\\' || r == '\n' {
			cost = 2
		}
		if size += cost; size > maxText {
			break
		}
		b.WriteRune(r)
	}
	return strings.TrimSpace(b.String())
}
