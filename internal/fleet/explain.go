package fleet

import (
	"context"
	"encoding/json"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
)

// Hypothesis is a call that nobody makes.
type Hypothesis struct {
	Key       string // id or name, or admin, open, voice, gateway
	Device    devices.ID
	Tool      string
	Via       access.Via
	Arguments json.RawMessage
}

// Explain says what would become of a call, and which rule would decide: as the
// owner of the device would, from what is known of its tools.
func (s *Service) Explain(ctx context.Context, h Hypothesis) (access.Explanation, error) {
	who, ended, err := s.callerNamed(h.Key)
	if err != nil {
		return access.Explanation{}, err
	}
	if ended != nil {
		return access.Explanation{Action: access.Deny, Rule: access.RuleCaller, Detail: ended.Error(),
			Steps: []access.Step{{Rule: access.RuleCaller, Verdict: access.Decided, Why: ended.Error()}}}, nil
	}
	v, err := s.Get(ctx, h.Device)
	if err != nil {
		return access.Explanation{}, err
	}
	q := access.Question{By: access.By{Who: who, Via: h.Via}, Device: string(h.Device), Labels: v.Device.Labels, Tool: h.Tool,
		Listed: v.CatalogState == devices.CatalogReady && !v.Presence.Partial}
	missing := false
	if v.Presence.Catalog != (devices.Hash{}) {
		cat, err := s.Catalog(ctx, v.Presence.Catalog)
		if err != nil {
			return access.Explanation{}, err
		}
		tool := cat.Tool(h.Tool)
		switch {
		case tool != nil:
			q.Listed, q.UserOnly = true, tool.UserOnly
		case q.Listed:
			missing = true
		}
	}
	x := s.Guard().Explain(q, h.Arguments)
	if missing && x.Action != access.Deny {
		x.Detail = "the rules allow it, but the device has no such tool: the call would be refused as " + string(devices.CodeToolUnknown)
	}
	return x, nil
}

// callerNamed finds whom a key lets in, and why it does not any more.
func (s *Service) callerNamed(name string) (who *access.Caller, ended, err error) {
	for _, c := range []*access.Caller{access.Admin, access.Open, access.Voice, access.Gateway} {
		if c.Key == name {
			return c, nil, nil
		}
	}
	now := time.Now()
	k, ok := s.Keys().Find(name, now)
	if !ok {
		return nil, nil, devices.Errorf(devices.CodeNotFound, "there is no key %q; admin, open, voice and gateway are the callers without one", name)
	}
	who, _ = s.Keys().Caller(k.ID)
	return who, k.Ended(now), nil
}
