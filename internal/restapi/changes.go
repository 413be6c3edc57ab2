package restapi

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
)

type deviceChangesInput struct {
	DevicePath
	Page
	Since string `query:"since" doc:"The list has only changes since then. It is RFC 3339, or a duration before now, such as 1h or 7d."`
}

type changesInput struct {
	Page
	Since string `query:"since" doc:"The list has only changes since then. It is RFC 3339, or a duration before now, such as 1h or 7d. Without since and after the list begins with the oldest change that is kept."`
	After int64  `query:"after" minimum:"0" doc:"The list has only changes with a higher revision."`
}

func (s *Server) changeRoutes() {
	codes := []devices.Code{devices.CodeUnavailable}
	register(s, s.operation(http.MethodGet, "/v1/devices/{device}/changes", about{id: "listDeviceChanges", scope: access.ScopeRead, tag: tagDevices, summary: "List the decisions about a device",
		text:   "Those about a device that was forgotten are kept as well.",
		answer: "A page, newest first.", codes: append(codes, devices.CodeDeviceUnknown)}), s.listDeviceChanges)
	register(s, s.operation(http.MethodGet, "/v1/changes", about{id: "listChanges", scope: access.ScopeRead, tag: tagDevices, summary: "List all decisions",
		text: "The log of the fleet. Changes are kept for 90 days, at most 2,000,000 of them. A key for some devices sees the changes of these devices alone: " +
			"a page may have fewer items than limit, or none, and a next_cursor nevertheless.",
		answer: "A page, oldest first.", codes: codes}), s.listChanges)
}

func newChanges(changes []devices.Change) []api.Change {
	out := make([]api.Change, len(changes))
	for i, c := range changes {
		if c.Aspect == devices.AspectRotation {
			c.Value = publicRotation(c.Value)
		}
		out[i] = api.Change{Revision: c.Revision, Device: string(c.Device), Aspect: string(c.Aspect), Value: c.Value, Who: c.Who, At: api.At(c.At)}
	}
	return out
}

// publicRotation leaves out what is sealed: the log is for everybody who reads devices.
func publicRotation(value json.RawMessage) json.RawMessage {
	var r devices.Rotation
	if json.Unmarshal(value, &r) != nil {
		return json.RawMessage("{}")
	}
	out, err := json.Marshal(struct {
		Generation    int64     `json:"generation"`
		Previous      int64     `json:"previous"`
		PreviousUntil time.Time `json:"previous_until"`
		Secret        int64     `json:"secret,omitempty"`
		Admin         int64     `json:"admin,omitempty"`
	}{r.Generation, r.Previous, r.PreviousUntil, r.Secret(), r.Admin})
	if err != nil {
		return json.RawMessage("{}")
	}
	return out
}

func (s *Server) listDeviceChanges(ctx context.Context, in *deviceChangesInput) (*answer[api.List[api.Change]], error) {
	id := deviceOf(ctx)
	p, err := s.page(ctx, in.Page)
	if err != nil {
		return nil, err
	}
	since, err := p.time("since", in.Since)
	if err != nil {
		return nil, err
	}
	list, err := fillPage(p, pieceLimit, func(after string, n int) ([]api.Change, string, error) {
		before, err := numberOf(after)
		if err != nil {
			return nil, "", err
		}
		changes, err := s.opt.Service.DeviceChanges(ctx, id, before, n+1)
		next := ""
		if len(changes) > n {
			changes = changes[:n]
			next = numberPlace(changes[n-1].Revision)
		}
		if i := slices.IndexFunc(changes, func(c devices.Change) bool { return c.At.Before(since) }); i >= 0 {
			changes, next = changes[:i], ""
		}
		return newChanges(changes), next, err
	})
	if err == nil && len(list.Items) == 0 && p.after == "" {
		_, err = s.opt.Service.Get(ctx, id) // nobody has no changes
	}
	return answerOf(list, err)
}

func (s *Server) listChanges(ctx context.Context, in *changesInput) (*answer[api.List[api.Change]], error) {
	p, err := s.page(ctx, in.Page)
	if err != nil {
		return nil, err
	}
	since, err := p.time("since", in.Since)
	if err != nil {
		return nil, err
	}
	list, err := fillPage(p, pieceLimit, func(after string, n int) ([]api.Change, string, error) {
		place, err := numberOf(after)
		if err != nil {
			return nil, "", err
		}
		changes, next, err := s.opt.Service.ChangesSince(ctx, caller(ctx), since, max(in.After, place), n)
		if errors.Is(err, devices.ErrPruned) {
			return nil, "", &devices.Error{Code: devices.CodeNotFound, Detail: "the log does not go back that far; leave since and after out to begin with the oldest change that is kept"}
		}
		if next == 0 {
			return newChanges(changes), "", err
		}
		return newChanges(changes), numberPlace(next), err
	})
	return answerOf(list, err)
}
