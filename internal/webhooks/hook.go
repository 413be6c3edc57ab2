// Package webhooks delivers events of the fleet to addresses that people name, signed as Standard Webhooks
// (https://www.standardwebhooks.com). Deliveries are made from the event streams, at least once and for each device in order,
// by one node at a time for each webhook: the position after which it continues is in the database, and is written when
// the receiver has accepted.
package webhooks

import (
	"context"
	"encoding/base64"
	"errors"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/egress"
	"fleetd/internal/selector"
	"fleetd/internal/timespan"
)

// Limits of webhooks.
const (
	// MaxHooks is how many a fleet has, but for those of keys that ended. Keys have shares of it (access.Share).
	MaxHooks = 100
	maxURL   = 2048
	// secretPrefix and the sizes of secrets are those of Standard Webhooks, in bytes.
	secretPrefix  = "whsec_"
	newSecret     = 32
	minSecret     = 24
	maxSecret     = 64
	minOfflineFor = 10 * time.Second
	maxOfflineFor = 30 * 24 * time.Hour
)

// Hook is one webhook.
type Hook struct {
	ID        string
	Owner     string // id of the key that created it
	OwnerName string
	URL       string
	Types     []devices.EventKind
	Select    string // of devices; empty: all
	// OfflineFor, unless 0, delays events of the kind offline until a device has been offline for this long.
	OfflineFor time.Duration
	Sealed     string // the secret
	CreatedAt  time.Time
	Version    int64 // raised by every change of the above
	Status
}

// Status is what the node that delivers has done.
type Status struct {
	Position     string // text of devices.EventPosition; empty: none
	Gap          string // JSON array; empty: nothing is missing
	Delivered    int64
	DeliveredAt  time.Time
	FailingSince time.Time // zero: the last attempt was successful
	LastError    string
	DisabledAt   time.Time // zero: it is delivered
}

// OfflineDevice is a device that is offline.
type OfflineDevice struct {
	Device devices.ID
	Since  time.Time
	Reason string
	// Reported: the webhook has it, or it was left out.
	Reported bool
}

// ErrStale is an error of a Store, beside devices.ErrNotFound and devices.ErrDatabase.
var ErrStale = errors.New("the webhook was changed or deleted meanwhile")

// Store keeps webhooks.
type Store interface {
	List(ctx context.Context) ([]Hook, error)
	Get(ctx context.Context, id string) (Hook, error)
	// Create adds a webhook if permit, which gets the number of webhooks of each owner, returns no error. No other one is
	// created meanwhile.
	Create(ctx context.Context, h Hook, permit func(held map[string]int64) error) error
	// Update writes what people set of a webhook; ErrStale if its version is not that of h any more.
	Update(ctx context.Context, h Hook) error
	Reseal(ctx context.Context, id, old, sealed string) error
	// Delete deletes a webhook; ErrStale if it does not have this version any more. 0 is any.
	Delete(ctx context.Context, id string, version int64) error
	// Lease takes or extends the lease of a webhook with this version for an instance; false if another has it.
	// A Store that one process uses has no leases: it writes nothing.
	Lease(ctx context.Context, id, instance string, version int64, lasts time.Duration) (bool, error)
	// Release ends the leases of an instance.
	Release(ctx context.Context, instance string) error
	// Save writes the status of webhooks, by id. It returns those whose lease the instance does not have any more.
	Save(ctx context.Context, instance string, statuses map[string]Status) (stale []string, err error)
	// Absent returns at most limit devices that are offline since before a time, in order of time and device, those after one.
	Absent(ctx context.Context, id string, after OfflineDevice, before time.Time, limit int) ([]OfflineDevice, error)
	// Report records that the absence of a device was reported. ended: nobody is to be told of its end.
	Report(ctx context.Context, id string, d OfflineDevice, ended bool) error
	// Reported returns since when a device was offline whose absence was reported and whose return was not; zero if there is none.
	Reported(ctx context.Context, id string, device devices.ID) (time.Time, error)
	// Prune deletes the records of absences that began before a time.
	Prune(ctx context.Context, id string, before time.Time) error
}

// check returns an error of CodeBadRequest if the settings of a webhook are not valid.
func (h *Hook) check(allow *egress.Allow) error {
	u, err := url.Parse(h.URL)
	if err == nil && u.Port() != "" {
		_, err = net.LookupPort("tcp", u.Port())
	}
	switch {
	case err != nil, u.Scheme != "https" && u.Scheme != "http", u.Hostname() == "", len(h.URL) > maxURL:
		return devices.Errorf(devices.CodeBadRequest, "url must be an http or https URL of at most %d bytes", maxURL)
	case u.User != nil || u.Fragment != "":
		return devices.Errorf(devices.CodeBadRequest, "url must have neither user nor fragment")
	case len(h.Types) == 0:
		return devices.Errorf(devices.CodeBadRequest, "types is missing: name the events to deliver, some of %s", strings.Join(devices.Texts(devices.StoredKinds()), ", "))
	}
	if err := allow.CheckHost(u.Hostname()); err != nil {
		return devices.Errorf(devices.CodeBadRequest, "url: %s", err.Error())
	}
	for i, kind := range h.Types {
		if !slices.Contains(devices.StoredKinds(), kind) {
			return devices.Errorf(devices.CodeBadRequest, "types must be some of %s, not %q", strings.Join(devices.Texts(devices.StoredKinds()), ", "), kind)
		}
		if slices.Contains(h.Types[:i], kind) {
			return devices.Errorf(devices.CodeBadRequest, "types has %q twice", kind)
		}
	}
	sel, err := selector.Parse(h.Select)
	if err == nil {
		err = errors.Join(sel.Identity(), sel.Check())
	}
	if err != nil {
		return devices.Errorf(devices.CodeBadRequest, "select: %s", err.Error())
	}
	if h.OfflineFor != 0 {
		if !slices.Contains(h.Types, devices.EventOffline) {
			return devices.Errorf(devices.CodeBadRequest, "offline_for needs the type offline")
		}
		if h.OfflineFor < minOfflineFor || h.OfflineFor > maxOfflineFor {
			return devices.Errorf(devices.CodeBadRequest, "offline_for must be from %s to %s", timespan.Format(minOfflineFor), timespan.Format(maxOfflineFor))
		}
	}
	return nil
}

// parseSecret returns the bytes of a secret.
func parseSecret(text string) ([]byte, error) {
	encoded, ok := strings.CutPrefix(text, secretPrefix)
	key, err := base64.StdEncoding.DecodeString(encoded)
	if !ok || err != nil || len(key) < minSecret || len(key) > maxSecret {
		return nil, devices.Errorf(devices.CodeBadRequest, "secret must be whsec_ and the base64 of %d to %d bytes; leave it out to get a new one", minSecret, maxSecret)
	}
	return key, nil
}
