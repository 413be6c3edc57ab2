package fleet

import (
	"context"
	"encoding/json"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
)

// ExplainRequest is a hypothetical call.
type ExplainRequest struct {
	Key       string // id or name, or admin, open, voice, gateway
	Device    devices.ID
	Tool      string
	Via       access.Via
	Arguments json.RawMessage
}

// Explain reports how a call would be decided, and by which rule: as the owner of the
// device decides, with the tools that are known of it.
func (s *Service) Explain(ctx context.Context, h ExplainRequest) (access.Explanation, error) {
	who, ended, err := s.findCaller(h.Key)
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
	q := access.Query{By: access.Principal{Caller: who, Via: h.Via}, Device: string(h.Device), Labels: v.Device.Labels, Tool: h.Tool,
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
		x.Detail = "the rules allow it, but the device does not have the tool: the call would be refused with " + string(devices.CodeToolUnknown)
	}
	return x, nil
}

// findCaller returns the caller of a key, and the error if the key has ended.
func (s *Service) findCaller(name string) (who *access.Caller, ended, err error) {
	for _, c := range []*access.Caller{access.Admin, access.Open, access.Voice, access.Gateway} {
		if c.Key == name {
			return c, nil, nil
		}
	}
	now := clock.Now()
	k, ok := s.Keys().Find(name, now)
	if !ok {
		return nil, nil, devices.Errorf(devices.CodeNotFound, "unknown key %q; give the id or name of a key, or admin, open, voice or gateway", name)
	}
	who, _ = s.Keys().Caller(k.ID)
	return who, s.Keys().EndedError(k, now), nil
}
