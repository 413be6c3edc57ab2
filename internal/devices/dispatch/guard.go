package dispatch

import (
	"context"
	crand "crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/devices/session"
	"fleetd/internal/devices/speech"
)

// Limits of what a session remembers for its callers.
const (
	// ConfirmationLife is how long a call may be confirmed after it was refused
	// for want of that.
	ConfirmationLife = 60 * time.Second
	maxConfirmations = 64 // of one device; the oldest makes room
	maxOfCaller      = 4  // of them, of one caller
	maxShared        = 32 // answers of one device; beyond that calls share nothing
)

// callerState is what is kept for the callers of one session's device. It is made
// when first needed: most devices are never asked for more than they sent. It is
// safe for concurrent use.
type callerState struct {
	mu            sync.Mutex
	confirmations []confirmation // oldest first
	shared        map[string]*sharedCall
}

// callersOf returns the state of a session's callers.
func callersOf(x *session.Session) *callerState {
	return x.CallerState(func() any { return &callerState{shared: map[string]*sharedCall{}} }).(*callerState)
}

// confirmation is a call that waits for a person's yes.
type confirmation struct {
	token   string
	key     string            // whose it is
	call    [sha256.Size]byte // whose it is, and what exactly
	expires time.Time
}

// maxToolName bounds a tool's name, in bytes; stock firmware's longest has 31.
const maxToolName = 256

// isToolName tells whether a name is the same to the device as to us: it ends
// names at the first NUL, and gets no bytes that are not text.
func isToolName(name string) bool {
	for _, c := range name {
		if c < ' ' || c == 0x7f || c == utf8.RuneError {
			return false
		}
	}
	return name != "" && len(name) <= maxToolName
}

// errNoRules refuses calls as long as the operator's rules are not known.
var errNoRules = &devices.Error{Code: devices.CodeUnavailable, Part: "database",
	Detail: "this node has not read the fleet's rules yet: its database has not answered since it was first started; ask another node, or again"}

// guard is where every way in ends: whether this caller may have this tool of
// this device, with these arguments, now. It is asked by the owner, so that
// there is one answer.
func (s *Dispatcher) guard(ctx context.Context, x *session.Session, c *devices.ToolCall) error {
	if !s.rules.known.Load() {
		return errNoRules
	}
	if err := s.Permit(ctx, c.By, access.ScopeCall, c.Device); err != nil {
		return err // it may be another node that let the caller in, and this one that lacks the labels
	}
	known := x.Tools()
	var tool *catalog.Tool
	if known.List != nil {
		tool = known.List.Tool(c.Tool)
	}
	g := s.Guard()
	c.Judged = g
	if g.NeedsLabels() {
		if err := x.AwaitRow(ctx); err != nil {
			return err
		}
	}
	if strings.HasPrefix(c.Confirmation, declinedMark) {
		return callersOf(x).decline(c)
	}
	d := g.Decide(access.Question{By: c.By, Device: string(c.Device), Labels: x.Labels(), Tool: c.Tool,
		Listed: tool != nil || known.Complete, UserOnly: tool != nil && tool.UserOnly})
	if d.Refusal != nil {
		return Refused(d.Refusal)
	}
	if no := g.CheckURL(c.Tool, c.Arguments); no != nil {
		return Refused(no)
	}
	if d.Action == access.Confirm {
		return callersOf(x).confirm(c, d.Rule)
	}
	return nil
}

// stillMay asks again after a call has waited for its turn: its key may have
// ended meanwhile, and rules may have changed. What a person confirmed stays so.
func (s *Dispatcher) stillMay(ctx context.Context, x *session.Session, c *devices.ToolCall) error {
	if err := s.stillValid(c.By); err != nil {
		return err
	}
	g := s.Guard()
	if g == c.Judged {
		return nil
	}
	if g.NeedsLabels() {
		if err := x.AwaitRow(ctx); err != nil {
			return err
		}
	}
	d := g.Decide(access.Question{By: c.By, Device: string(c.Device), Labels: x.Labels(), Tool: c.Tool, Listed: true})
	if d.Refusal == nil {
		d.Refusal = g.CheckURL(c.Tool, c.Arguments)
	}
	if d.Refusal != nil {
		return Refused(d.Refusal)
	}
	return nil
}

// stillValid tells whether the caller's key has not ended.
func (s *Dispatcher) stillValid(by access.By) error {
	if err := s.rules.keys.Valid(by.Who, time.Now()); err != nil {
		return devices.Errorf(devices.CodeUnauthorized, "%v", err)
	}
	return nil
}

// declinedMark stands before a confirmation that a person did not give.
const declinedMark = "no:"

// Declined is what a call carries in place of a confirmation if the person who
// was asked said no: the call is not made, and the confirmation is void.
func Declined(confirmation string) string { return declinedMark + confirmation }

// decline makes a confirmation void, and is never nil.
func (d *callerState) decline(c *devices.ToolCall) error {
	token := strings.TrimPrefix(c.Confirmation, declinedMark)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.confirmations = slices.DeleteFunc(d.confirmations, func(known confirmation) bool { return known.key == c.By.Key() && known.is(token) })
	return &devices.Error{Code: devices.CodeConfirmation, Rule: access.RuleDeclined, Detail: "the person who was asked did not confirm; the tool was not called"}
}

// is compares in constant time.
func (k *confirmation) is(token string) bool {
	return subtle.ConstantTimeCompare([]byte(k.token), []byte(token)) == 1
}

// confirm takes the token of an earlier refusal, once, or refuses and gives
// one. It is good for this caller, device, tool and arguments alone, and ends
// with the connection.
func (d *callerState) confirm(c *devices.ToolCall, rule string) error {
	now := time.Now()
	call := callDigest(c)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.confirmations = slices.DeleteFunc(d.confirmations, func(known confirmation) bool { return now.After(known.expires) })
	if c.Confirmation != "" {
		i := slices.IndexFunc(d.confirmations, func(known confirmation) bool {
			return known.is(c.Confirmation) && known.call == call
		})
		if i >= 0 {
			d.confirmations = slices.Delete(d.confirmations, i, i+1)
			return nil
		}
	}
	fresh := confirmation{token: crand.Text(), key: c.By.Key(), call: call, expires: now.Add(ConfirmationLife)}
	d.waitLocked(fresh)
	e := devices.Errorf(devices.CodeConfirmation, "the tool %q needs a person's yes: make the same call with this confirmation within %d s", c.Tool, int(ConfirmationLife/time.Second))
	if c.Confirmation != "" {
		e.Detail = "the confirmation is for another call, used, or too old; " + e.Detail
	}
	e.Rule, e.Confirmation = rule, fresh.token
	return e
}

// waitLocked keeps a call for its yes. Nobody's calls push another's out, as long
// as there is room at all.
func (d *callerState) waitLocked(fresh confirmation) {
	mine := 0
	for _, known := range d.confirmations {
		if known.key == fresh.key {
			mine++
		}
	}
	oldest := -1
	switch {
	case mine >= maxOfCaller:
		oldest = slices.IndexFunc(d.confirmations, func(known confirmation) bool { return known.key == fresh.key })
	case len(d.confirmations) >= maxConfirmations:
		oldest = 0
	}
	if oldest >= 0 {
		d.confirmations = slices.Delete(d.confirmations, oldest, oldest+1)
	}
	d.confirmations = append(d.confirmations, fresh)
}

// callDigest tells one call from every other. Each part is a hash of its own
// there, so that none runs into the next.
func callDigest(c *devices.ToolCall) (sum [sha256.Size]byte) {
	h := sha256.New()
	for _, part := range [][]byte{[]byte(c.By.Key()), []byte(c.Tool), c.Arguments} {
		inner := sha256.Sum256(part)
		h.Write(inner[:])
	}
	h.Sum(sum[:0])
	return sum
}

// sharedCall is one call of a tool that only reads, and those who wait for its
// answer, too.
type sharedCall struct {
	done   chan struct{} // closed when the rest is set
	result devices.ToolResult
	err    error
	own    bool      // the call ended with its caller's patience, which is nobody else's
	until  time.Time // how long the answer may be given again
}

// share makes one call of identical ones at the same time, and gives its answer
// again for ttl. Every caller has passed the guard for itself.
func (s *Dispatcher) share(ctx context.Context, d *callerState, c *devices.ToolCall, ttl time.Duration, call func() (devices.ToolResult, error)) (devices.ToolResult, error) {
	key := c.Tool + "\x00" + string(c.Arguments)
	for {
		d.mu.Lock()
		known := d.shared[key]
		if known == nil || known.stale(time.Now()) {
			if len(d.shared) >= maxShared {
				d.forgetLocked(time.Now())
			}
			if len(d.shared) >= maxShared {
				d.mu.Unlock()
				return call()
			}
			mine := &sharedCall{done: make(chan struct{})}
			d.shared[key] = mine
			d.mu.Unlock()
			return d.lead(ctx, key, mine, ttl, call)
		}
		d.mu.Unlock()
		select {
		case <-known.done:
			if !known.own {
				s.stats.SharedCalls.Add(1)
				return known.result, known.err
			}
		case <-ctx.Done():
			return devices.ToolResult{}, session.TimeoutCall(ctx, false)
		}
	}
}

// outdate forgets what was read before, and lets nobody join who reads at this
// moment: a call that does something has ended, and what it did must show.
func outdate(x *session.Session) {
	if d, ok := x.CallerState(nil).(*callerState); ok {
		d.mu.Lock()
		clear(d.shared)
		d.mu.Unlock()
	}
}

// lead makes the call that others share.
func (d *callerState) lead(ctx context.Context, key string, mine *sharedCall, ttl time.Duration, call func() (devices.ToolResult, error)) (devices.ToolResult, error) {
	mine.own = true // also if call panics
	defer func() {
		d.mu.Lock()
		mine.until = time.Now().Add(ttl)
		if (ttl <= 0 || mine.own || mine.err != nil || mine.result.IsError) && d.shared[key] == mine {
			delete(d.shared, key)
		}
		d.mu.Unlock()
		close(mine.done)
	}()
	mine.result, mine.err = call()
	mine.own = mine.err != nil && ctx.Err() != nil
	return mine.result, mine.err
}

// stale tells whether an answer is there and too old. The caller holds the
// lock.
func (s *sharedCall) stale(now time.Time) bool {
	select {
	case <-s.done:
		return now.After(s.until)
	default:
		return false
	}
}

func (d *callerState) forgetLocked(now time.Time) {
	for key, s := range d.shared {
		if s.stale(now) {
			delete(d.shared, key)
		}
	}
}

// guardRPC is guard for a request that calls no tool. What a custom firmware
// makes of other methods no rule about tools can tell.
func (s *Dispatcher) guardRPC(ctx context.Context, c *devices.RPCCall) error {
	scope := access.ScopeUser
	switch c.Method {
	case "ping", "tools/list", "prompts/list", "resources/list", "resources/templates/list":
		scope = access.ScopeCall
	}
	if err := s.Permit(ctx, c.By, scope, c.Device); err != nil {
		return err
	}
	if scope == access.ScopeUser && len(c.By.Who.Tools) > 0 {
		return Refused(&access.Refusal{Rule: access.RuleTools, Detail: "the key is for some tools alone, and " + devices.Clip(c.Method) + " is none"})
	}
	return nil
}

// messageScope is what sending a message of this type takes. `system` restarts
// devices, as tools for people do; `iot` was how firmware before MCP was told to
// act.
func messageScope(kind string) access.Scope {
	switch {
	case speech.IsSpeech(kind):
		return access.ScopeAudio
	case kind == "system", kind == "iot":
		return access.ScopeUser
	}
	return access.ScopeCall
}

// guardMessage tells whether the caller may send this device a message of this
// type. The device reads the type of a message as it stands.
func (s *Dispatcher) guardMessage(ctx context.Context, by access.By, id devices.ID, kind string) error {
	if err := s.Permit(ctx, by, messageScope(kind), id); err != nil {
		return err
	}
	if len(by.Who.Tools) > 0 && !speech.IsSpeech(kind) {
		return Refused(&access.Refusal{Rule: access.RuleTools, Detail: fmt.Sprintf("the key %q is for some tools alone, and a message of type %s is none", by.Name(), kind)})
	}
	return nil
}
