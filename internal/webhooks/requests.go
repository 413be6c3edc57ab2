package webhooks

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"net/url"
	"slices"
	"strings"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/tasks"
	"fleetd/internal/timespan"
)

// List returns the webhooks that a caller may see: those that its key created; administrators see all.
func (m *Manager) List(ctx context.Context, by access.Principal) ([]api.Webhook, error) {
	hooks, err := m.opt.Store.List(ctx)
	if err != nil {
		return nil, devices.AsError(err)
	}
	out := []api.Webhook{}
	for i := range hooks {
		if owns(by, &hooks[i]) {
			out = append(out, m.view(&hooks[i]))
		}
	}
	return out, nil
}

func owns(by access.Principal, h *Hook) bool {
	return by.Caller != nil && (by.Caller.Scopes.Has(access.ScopeAdmin) || by.Owns(h.Owner))
}

// get returns a webhook of the caller; those of others are not found.
func (m *Manager) get(ctx context.Context, by access.Principal, id string) (Hook, error) {
	h, err := m.opt.Store.Get(ctx, id)
	if err == nil && !owns(by, &h) {
		err = devices.ErrNotFound
	}
	if errors.Is(err, devices.ErrNotFound) {
		return h, devices.Errorf(devices.CodeNotFound, "there is no webhook with this id; GET /v1/webhooks lists them")
	}
	if err != nil {
		return h, devices.AsError(err)
	}
	return h, nil
}

func (m *Manager) view(h *Hook) api.Webhook {
	out := api.Webhook{ID: h.ID, URL: h.URL, Types: devices.Texts(h.Types), Select: h.Select, CreatedBy: h.OwnerName, CreatedAt: api.At(h.CreatedAt), State: "active", Reason: m.stopped(h),
		Delivered: h.Delivered, Version: h.Version, DeliveredAt: api.At(h.DeliveredAt), FailingSince: api.At(h.FailingSince), LastError: h.LastError}
	if h.OfflineFor > 0 {
		out.OfflineFor = timespan.Format(h.OfflineFor)
	}
	switch {
	case out.Reason != "":
		out.State = "stopped"
	case !h.DisabledAt.IsZero():
		out.State, out.Reason = "disabled", "its receiver accepted nothing for three days; repair the receiver, then enable the webhook"
	case !h.FailingSince.IsZero():
		out.State = "failing"
	}
	return out
}

// Create creates a webhook that acts as its creator.
func (m *Manager) Create(ctx context.Context, by access.Principal, n api.NewWebhook) (out api.CreatedWebhook, err error) {
	h := Hook{ID: "wh_" + strings.ToLower(rand.Text()[:16]), Owner: by.Owner(), OwnerName: by.Name(), CreatedAt: clock.Now().Truncate(time.Microsecond), Version: 1}
	defer func() { m.opt.Fleet.NoteChange(by, "create_webhook", "", describe(&h), err) }()
	if err := m.opt.Fleet.Permit(ctx, by, access.ScopeEvents, ""); err != nil { // it reads events
		return out, err
	}
	secret, err := m.set(&h, api.WebhookEdit{URL: &n.URL, Types: &n.Types, Select: &n.Select, OfflineFor: &n.OfflineFor, Secret: &n.Secret})
	if err != nil {
		return out, err
	}
	err = m.opt.Store.Create(ctx, h, func(held map[string]int64) error {
		if access.Share(MaxHooks, held, h.Owner, m.holder) == 0 {
			return devices.LimitReached("webhooks", MaxHooks)
		}
		return nil
	})
	if err != nil {
		return out, devices.AsError(err)
	}
	tasks.Signal(m.poke)
	return api.CreatedWebhook{Webhook: m.view(&h), Secret: secret}, nil
}

// Edit changes a webhook. It continues where it was.
func (m *Manager) Edit(ctx context.Context, by access.Principal, id string, e api.WebhookEdit) (out api.CreatedWebhook, err error) {
	h, err := m.get(ctx, by, id)
	defer func() { m.opt.Fleet.NoteChange(by, "edit_webhook", "", describe(&h)+changes(&e), err) }()
	if err == nil {
		err = m.match(&h, e.IfMatch)
	}
	if err != nil {
		return out, err
	}
	secret, err := m.set(&h, e)
	if err != nil {
		return out, err
	}
	switch err := m.opt.Store.Update(ctx, h); {
	case errors.Is(err, ErrStale):
		return out, errChanged
	case err != nil:
		return out, devices.AsError(err)
	}
	tasks.Signal(m.poke)
	return api.CreatedWebhook{Webhook: m.view(&h), Secret: secret}, nil
}

var errChanged = devices.Errorf(devices.CodeStale, "the webhook was changed or deleted by another request at the same time; read it again and repeat your change")

// match returns an error if a webhook has another revision; an empty one is any.
func (m *Manager) match(h *Hook, revision string) error {
	if v := m.view(h); revision != "" && revision != v.Revision() {
		return devices.Errorf(devices.CodeStale, "the webhook was changed since it was read; read it again and repeat your change")
	}
	return nil
}

// set applies an edit. made is a secret that was made for it.
func (m *Manager) set(h *Hook, e api.WebhookEdit) (made string, err error) {
	if e.URL != nil {
		h.URL = *e.URL
	}
	if e.Types != nil {
		h.Types = nil
		for _, kind := range *e.Types {
			h.Types = append(h.Types, devices.EventKind(kind))
		}
	}
	if e.Select != nil {
		h.Select = *e.Select
	}
	if e.OfflineFor != nil {
		h.OfflineFor = 0
		if *e.OfflineFor != "" {
			if h.OfflineFor, err = timespan.Parse(*e.OfflineFor); err != nil || h.OfflineFor <= 0 {
				return "", devices.Errorf(devices.CodeBadRequest, "offline_for must be a duration such as 10m")
			}
		}
	}
	if e.State != nil {
		if *e.State != "active" {
			return "", devices.Errorf(devices.CodeBadRequest, "state must be active, which enables a webhook that was disabled")
		}
		h.DisabledAt, h.FailingSince = time.Time{}, time.Time{}
	}
	if err := h.check(m.opt.Allow); err != nil {
		return "", err
	}
	if e.Secret == nil {
		return "", nil
	}
	text := *e.Secret
	if text == "" {
		b := make([]byte, newSecret)
		rand.Read(b) // never fails (crypto/rand)
		made = secretPrefix + base64.StdEncoding.EncodeToString(b)
		text = made
	}
	key, err := parseSecret(text)
	if err != nil {
		return "", err
	}
	h.Sealed = m.opt.Mint.Seal(sealPurpose, h.ID, key)
	return made, nil
}

// describe is the text of a webhook in the audit. Of its URL, which may contain a token, it has the host.
func describe(h *Hook) string {
	parts := []string{h.ID}
	if u, err := url.Parse(h.URL); err == nil && u.Host != "" {
		parts = append(parts, devices.Clip(u.Host))
	}
	return strings.TrimSpace(strings.Join(append(parts, strings.Join(devices.Texts(h.Types), ",")), " "))
}

// changes is the text of an edit in the audit: the members that it sets.
func changes(e *api.WebhookEdit) string {
	var names []string
	for name, set := range map[string]bool{"url": e.URL != nil, "types": e.Types != nil, "select": e.Select != nil, "offline_for": e.OfflineFor != nil, "secret": e.Secret != nil, "state": e.State != nil} {
		if set {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return ""
	}
	slices.Sort(names)
	return ", set: " + strings.Join(names, ", ")
}

// Get returns a webhook of the caller.
func (m *Manager) Get(ctx context.Context, by access.Principal, id string) (api.Webhook, error) {
	h, err := m.get(ctx, by, id)
	if err != nil {
		return api.Webhook{}, err
	}
	return m.view(&h), nil
}

// Delete deletes a webhook with this revision; an empty one is any.
func (m *Manager) Delete(ctx context.Context, by access.Principal, id, revision string) error {
	h, err := m.get(ctx, by, id)
	if err == nil {
		err = m.match(&h, revision)
	}
	version := int64(0)
	if revision != "" {
		version = h.Version
	}
	if err == nil {
		switch err = m.opt.Store.Delete(ctx, h.ID, version); {
		case errors.Is(err, ErrStale):
			err = errChanged
		case errors.Is(err, devices.ErrNotFound):
			err = nil // by another request
		case err != nil:
			err = devices.AsError(err)
		}
	}
	m.opt.Fleet.NoteChange(by, "delete_webhook", "", describe(&h), err)
	tasks.Signal(m.poke)
	return err
}

// Test delivers a message of the type test at once, from this node.
func (m *Manager) Test(ctx context.Context, by access.Principal, id string) (api.WebhookTest, error) {
	h, err := m.get(ctx, by, id)
	if err != nil {
		return api.WebhookTest{}, err
	}
	if reason := m.stopped(&h); reason != "" {
		return api.WebhookTest{}, devices.Errorf(devices.CodeConflict, "the webhook has stopped: %s", reason)
	}
	key, err := m.opt.Mint.Open(sealPurpose, h.ID, h.Sealed)
	if err != nil {
		return api.WebhookTest{}, devices.Errorf(devices.CodeConflict, "the secret of the webhook was sealed with another --secret; set a new one")
	}
	begun := time.Now()
	data, err := json.Marshal(map[string]string{"requested_by": by.Name()})
	if err != nil {
		return api.WebhookTest{}, err
	}
	status, err := m.sender.send(ctx, h.URL, key, "msg_"+strings.ToLower(rand.Text()), message{Type: kindTest, Timestamp: begun.UTC().Truncate(time.Millisecond), Webhook: h.ID, Data: data})
	out := api.WebhookTest{Delivered: err == nil, Status: status, DurationMS: time.Since(begun).Milliseconds()}
	if err != nil {
		out.Error = err.Error()
	}
	return out, nil
}
