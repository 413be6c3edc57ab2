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

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/devices/session"
	"fleetd/internal/devices/speech"
)

// Limits of the state that a session keeps for its callers.
const (
	// ConfirmationLifetime is how long a call can be confirmed after it was refused without
	// a confirmation.
	ConfirmationLifetime   = 60 * time.Second
	maxConfirmations       = 64 // per device; the oldest is dropped
	maxConfirmationsPerKey = 4  // of these, per key
	maxShared              = 32 // shared answers per device; beyond that calls are not shared
)

// callerState is the state that a session keeps for the callers of its device. It is created
// when first needed, since most devices need none. It is safe for concurrent use.
type callerState struct {
	mu            sync.Mutex
	confirmations []confirmation // oldest first
	shared        map[string]*sharedCall
}

// callerStateOf returns the caller state of a session.
func callerStateOf(x *session.Session) *callerState {
	return session.CallerState(x, func() *callerState { return &callerState{shared: map[string]*sharedCall{}} })
}

// confirmation is a call that waits for the confirmation of a person.
type confirmation struct {
	token   string
	key     string            // key of the caller
	call    [sha256.Size]byte // digest of key, tool and arguments
	expires time.Time
}

// errNoRules refuses calls until the operator's rules were read.
var errNoRules = &devices.Error{Code: devices.CodeUnavailable, Part: "database",
	Detail: "this node has not read the fleet's rules from the database yet; try again, or use another node"}

// guard decides whether this caller may call this tool of this device with these arguments
// now. Calls of all interfaces pass it, on the node that holds the device.
func (s *Dispatcher) guard(ctx context.Context, x *session.Session, c *devices.ToolCall) error {
	if !s.rules.loaded.Load() {
		return errNoRules
	}
	if err := s.Permit(ctx, c.Principal, access.ScopeCall, c.Device); err != nil {
		return err // another node may have permitted the caller, and this one lacks the labels
	}
	known := x.Tools()
	var tool *catalog.Tool
	if known.List != nil {
		tool = known.List.Tool(c.Tool)
	}
	g := s.Guard()
	c.Guard = g
	if g.NeedsLabels() {
		if err := x.AwaitRow(ctx); err != nil {
			return err
		}
	}
	if strings.HasPrefix(c.Confirmation, declinedPrefix) {
		return callerStateOf(x).decline(c)
	}
	d := g.Decide(access.Query{By: c.Principal, Device: string(c.Device), Labels: x.Labels(), Tool: c.Tool,
		Listed: tool != nil || known.Complete, UserOnly: tool != nil && tool.UserOnly})
	switch {
	case d.Refusal != nil && d.Refusal.Rule == access.RuleUnlisted && known.Silent: // a stronger key would not be answered either
		return &devices.Error{Code: devices.CodeDeviceTimeout, Detail: "the device does not answer MCP requests, so that its tools are not known; restart it, or ask why with `fleetd explain`"}
	case d.Refusal != nil:
		return RefusalError(d.Refusal)
	}
	if no := g.CheckURL(c.Tool, c.Arguments); no != nil {
		return RefusalError(no)
	}
	if d.Action == access.Confirm && c.Job != "" {
		if slices.Contains(c.Confirmed, d.Rule) {
			return nil
		}
		return &devices.Error{Code: devices.CodeConfirmation, Rule: d.Rule, Detail: fmt.Sprintf("the rule %q requires a confirmation that the job does not have; create the job again", d.Rule)}
	}
	if d.Action == access.Confirm {
		return callerStateOf(x).confirm(c, d.Rule)
	}
	return nil
}

// recheck repeats the checks after a call has waited for its turn: its key may have been
// revoked, and rules may have changed. A confirmation stays valid.
func (s *Dispatcher) recheck(ctx context.Context, x *session.Session, c *devices.ToolCall) error {
	if err := s.checkKey(c.Principal); err != nil {
		return err
	}
	g := s.Guard()
	if g == c.Guard {
		return nil
	}
	if g.NeedsLabels() {
		if err := x.AwaitRow(ctx); err != nil {
			return err
		}
	}
	d := g.Decide(access.Query{By: c.Principal, Device: string(c.Device), Labels: x.Labels(), Tool: c.Tool, Listed: true})
	if d.Refusal == nil {
		d.Refusal = g.CheckURL(c.Tool, c.Arguments)
	}
	if d.Refusal != nil {
		return RefusalError(d.Refusal)
	}
	return nil
}

// checkKey returns an error if the principal's key has ended.
func (s *Dispatcher) checkKey(principal access.Principal) error {
	if err := s.rules.keys.Valid(principal.Caller, clock.Now()); err != nil {
		return devices.Errorf(devices.CodeUnauthorized, "%v", err)
	}
	return nil
}

// declinedPrefix marks a confirmation that a person declined.
const declinedPrefix = "no:"

// Declined returns what a call carries in place of a confirmation if the person declined:
// the call is not made, and the confirmation becomes invalid.
func Declined(confirmation string) string { return declinedPrefix + confirmation }

// decline invalidates a confirmation; it always returns an error.
func (d *callerState) decline(c *devices.ToolCall) error {
	token := strings.TrimPrefix(c.Confirmation, declinedPrefix)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.confirmations = slices.DeleteFunc(d.confirmations, func(known confirmation) bool { return known.key == c.Principal.Key() && known.matches(token) })
	return &devices.Error{Code: devices.CodeConfirmation, Rule: access.RuleDeclined, Detail: "the person did not confirm the call; the tool was not called"}
}

// matches compares the token in constant time.
func (k *confirmation) matches(token string) bool {
	return subtle.ConstantTimeCompare([]byte(k.token), []byte(token)) == 1
}

// confirm accepts the token of an earlier refusal, once, or refuses with a new one. A token
// is valid only for this caller, device, tool and arguments, and ends with the connection.
func (d *callerState) confirm(c *devices.ToolCall, rule string) error {
	now := time.Now()
	call := callDigest(c)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.confirmations = slices.DeleteFunc(d.confirmations, func(known confirmation) bool { return now.After(known.expires) })
	if c.Confirmation != "" {
		i := slices.IndexFunc(d.confirmations, func(known confirmation) bool {
			return known.matches(c.Confirmation) && known.call == call
		})
		if i >= 0 {
			d.confirmations = slices.Delete(d.confirmations, i, i+1)
			return nil
		}
	}
	fresh := confirmation{token: crand.Text(), key: c.Principal.Key(), call: call, expires: now.Add(ConfirmationLifetime)}
	d.addLocked(fresh)
	e := devices.Errorf(devices.CodeConfirmation, "the tool %q needs a person's confirmation: repeat the same call with this confirmation within %d s", c.Tool, int(ConfirmationLifetime/time.Second))
	if c.Confirmation != "" {
		e.Detail = devices.DetailConfirmationEnded + "; " + e.Detail
	}
	e.Rule, e.Confirmation = rule, fresh.token
	return e
}

// addLocked adds a confirmation. If its key has the most allowed, it replaces the oldest of
// that key; if there is no room, the oldest of all.
func (d *callerState) addLocked(fresh confirmation) {
	own := 0
	for _, known := range d.confirmations {
		if known.key == fresh.key {
			own++
		}
	}
	oldest := -1
	switch {
	case own >= maxConfirmationsPerKey:
		oldest = slices.IndexFunc(d.confirmations, func(known confirmation) bool { return known.key == fresh.key })
	case len(d.confirmations) >= maxConfirmations:
		oldest = 0
	}
	if oldest >= 0 {
		d.confirmations = slices.Delete(d.confirmations, oldest, oldest+1)
	}
	d.confirmations = append(d.confirmations, fresh)
}

// callDigest returns a digest that is different for different calls. Each part is hashed
// first, so that parts cannot be shifted into each other.
func callDigest(c *devices.ToolCall) (sum [sha256.Size]byte) {
	h := sha256.New()
	for _, part := range [][]byte{[]byte(c.Principal.Key()), []byte(c.Tool), c.Arguments} {
		inner := sha256.Sum256(part)
		h.Write(inner[:])
	}
	h.Sum(sum[:0])
	return sum
}

// sharedCall is one call of a read-only tool, with the callers that wait for its result.
type sharedCall struct {
	call      string        // its id
	done      chan struct{} // closed when the other fields are set
	result    devices.ToolResult
	err       error
	abandoned bool      // the call ended because its own caller left, so others must repeat it
	until     time.Time // how long the result may be reused
}

// share combines concurrent identical calls into one, and reuses its result for ttl. Every
// caller has passed the guard.
func (s *Dispatcher) share(ctx context.Context, d *callerState, c *devices.ToolCall, ttl time.Duration, call func() (devices.ToolResult, error)) (devices.ToolResult, error) {
	key := c.Tool + "\x00" + string(c.Arguments)
	for {
		d.mu.Lock()
		known := d.shared[key]
		if known == nil || known.stale(time.Now()) {
			if len(d.shared) >= maxShared {
				d.expireLocked(time.Now())
			}
			if len(d.shared) >= maxShared {
				d.mu.Unlock()
				return call()
			}
			own := &sharedCall{call: c.ID, done: make(chan struct{})}
			d.shared[key] = own
			d.mu.Unlock()
			return d.runShared(ctx, key, own, ttl, call)
		}
		d.mu.Unlock()
		begun := time.Now()
		c.Ahead = known.call
		select {
		case <-known.done:
			c.Waited = time.Since(begun)
			if !known.abandoned {
				s.stats.SharedCalls.Add(1)
				return known.result, known.err
			}
		case <-ctx.Done():
			c.Waited = time.Since(begun)
			return devices.ToolResult{}, devices.TimeoutCall(ctx, false)
		}
	}
}

// clearShared drops shared results, including those of calls in progress: a call that may
// change the device's state has ended, and later reads must show it.
func clearShared(x *session.Session) {
	if d := session.CallerState[callerState](x, nil); d != nil {
		d.mu.Lock()
		clear(d.shared)
		d.mu.Unlock()
	}
}

// runShared runs the call that others share.
func (d *callerState) runShared(ctx context.Context, key string, own *sharedCall, ttl time.Duration, call func() (devices.ToolResult, error)) (devices.ToolResult, error) {
	own.abandoned = true // also if call panics
	defer func() {
		d.mu.Lock()
		own.until = time.Now().Add(ttl)
		if (ttl <= 0 || own.abandoned || own.err != nil || own.result.IsError) && d.shared[key] == own {
			delete(d.shared, key)
		}
		d.mu.Unlock()
		close(own.done)
	}()
	own.result, own.err = call()
	own.abandoned = own.err != nil && ctx.Err() != nil
	return own.result, own.err
}

// stale reports whether a result exists and is too old. The caller holds callerState.mu.
func (s *sharedCall) stale(now time.Time) bool {
	select {
	case <-s.done:
		return now.After(s.until)
	default:
		return false
	}
}

func (d *callerState) expireLocked(now time.Time) {
	for key, s := range d.shared {
		if s.stale(now) {
			delete(d.shared, key)
		}
	}
}

// guardRPC is guard for a request that calls no tool. Rules about tools do not apply to it.
func (s *Dispatcher) guardRPC(ctx context.Context, c *devices.RPCCall) error {
	scope := access.ScopeUser
	switch c.Method {
	case "ping", "tools/list", "prompts/list", "resources/list", "resources/templates/list":
		scope = access.ScopeCall
	}
	if err := s.Permit(ctx, c.Principal, scope, c.Device); err != nil {
		return err
	}
	if scope == access.ScopeUser && len(c.Principal.Caller.Tools) > 0 {
		return RefusalError(&access.Refusal{Rule: access.RuleTools, Detail: "the key is limited to some tools and cannot send the method " + devices.Clip(c.Method)})
	}
	return nil
}

// MessageScope returns the scope for a message of this type. `system` restarts devices, like
// user-only tools; `iot` is the tool call of firmware before MCP.
func MessageScope(kind string) access.Scope {
	switch {
	case speech.IsSpeech(kind):
		return access.ScopeAudio
	case kind == "system", kind == "iot":
		return access.ScopeUser
	}
	return access.ScopeCall
}

// guardMessage returns an error if the principal may not send this device a message of this
// type.
func (s *Dispatcher) guardMessage(ctx context.Context, principal access.Principal, id devices.ID, kind string) error {
	if err := s.Permit(ctx, principal, MessageScope(kind), id); err != nil {
		return err
	}
	if len(principal.Caller.Tools) > 0 && !speech.IsSpeech(kind) {
		return RefusalError(&access.Refusal{Rule: access.RuleTools, Detail: fmt.Sprintf("the key %q is limited to some tools and cannot send messages of type %s", principal.Name(), kind)})
	}
	return nil
}
