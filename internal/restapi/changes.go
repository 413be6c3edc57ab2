package restapi

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
)

type deviceChangesInput struct {
	DevicePath
	Page
	Since string `query:"since" doc:"Only later changes: a time (RFC 3339) or a revision."`
}

type changesInput struct {
	Page
	Since string `query:"since" doc:"Only later changes: a time (RFC 3339) or a revision. Without it the list begins with the oldest change that is kept."`
}

func (s *Server) changeRoutes() {
	codes := []devices.Code{devices.CodeUnavailable}
	huma.Register(s.api, s.operation(http.MethodGet, "/v1/devices/{device}/changes", about{id: "listDeviceChanges", scope: access.ScopeRead, tag: tagDevices, summary: "List the decisions about a device",
		text:   "Those about a device that was forgotten are kept as well.",
		answer: "A page, newest first.", codes: append(codes, devices.CodeDeviceUnknown)}), s.listDeviceChanges)
	huma.Register(s.api, s.operation(http.MethodGet, "/v1/changes", about{id: "listChanges", scope: access.ScopeRead, tag: tagDevices, summary: "List all decisions",
		text: "The log of the fleet. Changes are kept for 90 days, at most 2,000,000 of them. A key for some devices sees the changes of these devices alone: " +
			"a page may have fewer items than limit, or none, and a next_cursor nevertheless.",
		answer: "A page, oldest first.", codes: codes}), s.listChanges)
}

// parseSince reads a time or a revision.
func parseSince(text string) (at time.Time, revision int64, err error) {
	if text == "" {
		return at, 0, nil
	}
	if revision, err = strconv.ParseInt(text, 10, 64); err == nil && revision >= 0 {
		return at, revision, nil
	}
	if at, err = time.Parse(time.RFC3339, text); err != nil {
		return at, 0, badRequest("since must be a revision, or a time such as 2026-03-01T12:00:00Z")
	}
	return at, 0, nil
}

// revisionOf reads the place of a cursor; 0 for the first page.
func revisionOf(cursor string) (int64, error) {
	place, err := parseCursor(cursor)
	if err != nil || place == "" {
		return 0, err
	}
	n, err := strconv.ParseInt(place, 10, 64)
	if err != nil || n <= 0 {
		return 0, errCursor
	}
	return n, nil
}

func newChanges(changes []devices.Change) api.List[api.Change] {
	page := api.List[api.Change]{Items: []api.Change{}}
	for _, c := range changes {
		if c.Aspect == devices.AspectRotation {
			c.Value = publicRotation(c.Value)
		}
		page.Items = append(page.Items, api.Change{Revision: c.Revision, Device: string(c.Device), Aspect: string(c.Aspect), Value: c.Value, Who: c.Who, At: api.At(c.At)})
	}
	return page
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
	id, err := parseDevice(in.Device)
	if err != nil {
		return nil, err
	}
	since, after, err := parseSince(in.Since)
	if err != nil {
		return nil, err
	}
	before, err := revisionOf(in.Cursor)
	if err != nil {
		return nil, err
	}
	changes, err := s.opt.Service.DeviceChanges(ctx, id, before, in.Limit+1)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	if len(changes) == 0 && before == 0 {
		if _, err := s.opt.Service.Get(ctx, id); err != nil {
			return nil, s.problem(ctx, err)
		}
	}
	more := len(changes) > in.Limit
	changes = changes[:min(len(changes), in.Limit)]
	for i, c := range changes {
		if c.Revision <= after || c.At.Before(since) {
			changes, more = changes[:i], false
			break
		}
	}
	page := newChanges(changes)
	if more {
		page.NextCursor = newCursor(strconv.FormatInt(changes[len(changes)-1].Revision, 10))
	}
	return &answer[api.List[api.Change]]{page}, nil
}

func (s *Server) listChanges(ctx context.Context, in *changesInput) (*answer[api.List[api.Change]], error) {
	since, after, err := parseSince(in.Since)
	if err != nil {
		return nil, err
	}
	place, err := revisionOf(in.Cursor)
	if err != nil {
		return nil, err
	}
	changes, next, err := s.opt.Service.ChangesSince(ctx, caller(ctx), since, max(after, place), in.Limit)
	if errors.Is(err, devices.ErrPruned) {
		return nil, newProblem(&devices.Error{Code: devices.CodeNotFound, Detail: "the log does not go back that far; leave since out to begin with the oldest change that is kept"})
	}
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	page := newChanges(changes)
	if next > 0 {
		page.NextCursor = newCursor(strconv.FormatInt(next, 10))
	}
	return &answer[api.List[api.Change]]{page}, nil
}
