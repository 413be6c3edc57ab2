package vision

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"time"
	"unicode"
	"unicode/utf8"

	"fleetd/internal/devices"
)

// Limits of explanations. The device waits 30 s for the head of its answer,
// counted from its last byte (http_client.h), and hangs for ever on one of
// 8 KiB.
const (
	ExplainTime   = 25 * time.Second // from the photo's last byte to its answer, storing included
	MaxExplaining = 16               // photos being explained at once
	MaxWaiting    = 64               // photos waiting for one of those; more go without
	maxText       = 5 << 10          // bytes of an explanation as JSON writes it: the answer stays below 6 KiB
	maxReply      = 256 << 10        // bytes read of what an explainer answers
	explainWarn   = time.Minute      // between two warnings about explainers
)

// Outcomes of explanations. The list is closed: every value has a counter.
const (
	outcomeExplained = "explained"
	outcomeNone      = "none"   // there is nobody to ask
	outcomeLate      = "late"   // ExplainTime was over
	outcomeBusy      = "busy"   // MaxWaiting others wait
	outcomeFailed    = "failed" // the explainer refused, or its answer is unusable
	outcomeGone      = "gone"   // the device did not wait, or the node stops
)

// late is what the device gets in place of an explanation that took too long.
const late = "The photo is stored, but its explanation did not come in time."

// question is what an explainer is asked.
type question struct {
	device devices.ID
	photo  string
	text   string
	bytes  int64
	sha256 string
}

// explainer answers questions about photos. Its text is not to be trusted;
// errNobody means that there is none at the moment.
type explainer interface {
	explain(ctx context.Context, q question) (string, error)
	// check tells whether questions could be answered now.
	check(ctx context.Context) error
}

var errNobody = errors.New("nobody explains photos")

// explanations asks the explainer, for a bounded number of photos at once.
type explanations struct {
	ask     explainer // nil: photos are stored, and no more
	slots   chan struct{}
	waiting atomic.Int64
	warned  atomic.Int64 // unix nanoseconds
}

func newExplanations(ask explainer) *explanations {
	return &explanations{ask: ask, slots: make(chan struct{}, MaxExplaining)}
}

// enter waits for a place within ctx; "" means that there is one, to be left.
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
	case errors.Is(err, errNobody):
		return outcomeNone
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return outcomeLate
	case ctx.Err() != nil:
		return outcomeGone
	}
	return outcomeFailed
}

// explained asks about a stored photo and returns what the answer to the
// device says beside its name: the explanation, or a message in its place. No
// failure reaches the device: the photo is stored, and that stands.
func (s *Server) explained(ctx context.Context, q question, deadline time.Time) (text, message string) {
	e := s.explanations
	if e.ask == nil {
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
			text, err = e.ask.explain(ctx, q)
		}()
		if text = spoken(text); err == nil && text == "" {
			err = errors.New("its answer has no text")
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
		return "", late
	}
	return "", ""
}

// warnOf logs a failure, but not one for each photo while an explainer is away.
func (s *Server) warnOf(q question, err error) {
	now, last := time.Now().UnixNano(), s.explanations.warned.Load()
	if now-last > int64(explainWarn) && s.explanations.warned.CompareAndSwap(last, now) {
		s.opt.Log.Warn("a photo was not explained", "device", q.device, "photo", q.photo, "error", err)
	}
}

// CheckExplainer tells why photos could not be explained now; nil if they
// could, or if nobody was configured to.
func (s *Server) CheckExplainer(ctx context.Context) error {
	if s.explanations.ask == nil {
		return nil
	}
	return s.explanations.ask.check(ctx)
}

// Close gives up what the explainer holds. Call it after the last upload.
func (s *Server) Close() {
	if c, ok := s.explanations.ask.(*chat); ok {
		c.client.CloseIdleConnections()
	}
}

// spoken makes text of an explainer fit for a device, a language model and a
// terminal: valid, without control characters and without those that reverse
// the order of others, and cut between two characters so that JSON writes it in
// maxText bytes.
func spoken(text string) string {
	var b strings.Builder
	size := 0
	for _, r := range text {
		switch {
		case r == '\n' || r == '\u2028' || r == '\u2029':
			r = '\n'
		case r == '\t':
			r = ' '
		case r == utf8.RuneError: // also an invalid byte
			r = '\uFFFD'
		case unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r):
			continue
		}
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
