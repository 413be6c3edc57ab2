package devices

import (
	"slices"
	"time"
)

// Rotation is the generation below which no device of the fleet is: one fact
// for all of them, so that a rotation of the whole fleet writes one row and
// sends one message, however many devices there are.
type Rotation struct {
	Generation    int64     `json:"generation"`
	Previous      int64     `json:"previous"` // is valid, too, until PreviousUntil
	PreviousUntil time.Time `json:"previous_until"`
	// Secrets are those that replaced the one of the settings, oldest first; each is
	// sealed under that one. Admin is the number of the admin token.
	Secrets []SealedSecret `json:"secrets,omitempty"`
	Admin   int64          `json:"admin,omitempty"`
}

// SealedSecret is a secret of the fleet as it is kept.
type SealedSecret struct {
	Number int64     `json:"number"` // from 1
	Since  int64     `json:"since"`  // generation from which credentials are minted with it
	Sealed string    `json:"sealed"`
	At     time.Time `json:"at"`
}

// MaxSecrets is how many times the fleet's secret can be rotated.
const MaxSecrets = 1000

// Secret is the number of the newest secret; 0: the one of the settings.
func (r *Rotation) Secret() int64 {
	if len(r.Secrets) == 0 {
		return 0
	}
	return r.Secrets[len(r.Secrets)-1].Number
}

// Raised begins the next generation of all devices; highest is that of the device that
// is furthest. The one before stays valid until a time, and nothing below it.
func (r Rotation) Raised(highest int64, now, until time.Time) (Rotation, error) {
	if now.Before(r.PreviousUntil) {
		return r, Errorf(CodeForbidden, "the fleet was rotated already; the old credentials end at %s. A single device can be rotated or revoked meanwhile",
			r.PreviousUntil.UTC().Format(time.RFC3339))
	}
	r.Generation, r.Previous, r.PreviousUntil = max(r.Generation, highest)+1, r.Generation, until.UTC().Truncate(time.Microsecond)
	return r, nil
}

// WithSecret begins a new secret, from the generation that Raised has begun on. seal
// makes the secret of a number.
func (r Rotation) WithSecret(now time.Time, seal func(number int64) string) (Rotation, error) {
	if len(r.Secrets) >= MaxSecrets {
		return r, Errorf(CodeForbidden, "the secret was rotated %d times, which is the limit", MaxSecrets)
	}
	number := r.Secret() + 1
	r.Secrets = append(slices.Clone(r.Secrets), SealedSecret{Number: number, Since: r.Generation, Sealed: seal(number), At: now.UTC()})
	return r, nil
}

// Credentials is how far a device's credentials are.
type Credentials struct {
	Generation    int64
	PreviousUntil time.Time // until then older ones are valid, too; zero: they are not
}

// Secrets are a device's own generations of credentials; every method that asks
// what is valid takes those of the whole fleet, too. It has no lock: who keeps it
// guards it.
type Secrets struct {
	Generation    int64
	Revoked       bool
	Previous      int64
	PreviousUntil int64 // unix microseconds; the own previous generation is valid until then
	Confirmed     int64 // the highest generation that a connection came with
}

// SecretsOf returns the generations that a stored exception describes.
func SecretsOf(x Exception) Secrets {
	s := Secrets{Generation: x.Generation, Revoked: x.Revoked, Previous: x.Previous}
	if !x.PreviousUntil.IsZero() {
		s.PreviousUntil = x.PreviousUntil.UnixMicro()
	}
	return s
}

// Current is the generation that the device is given.
func (s *Secrets) Current(r Rotation) int64 { return max(s.Generation, r.Generation) }

// maxValid is how many generations can be valid at once: the device's own two
// beside the fleet's two.
const maxValid = 4

// Valid lists the generations whose credentials are valid, the newest first, and
// until when there is more than one. Whether the device was revoked is not part
// of it. An older one ends when a connection comes with a newer one.
func (s *Secrets) Valid(r Rotation, now time.Time) (list [maxValid]int64, n int, until time.Time) {
	list[0], n = s.Current(r), 1
	own, fleet := time.UnixMicro(s.PreviousUntil), r.PreviousUntil
	add := func(generation int64, end time.Time) {
		if generation >= list[0] || generation < s.Confirmed || !now.Before(end) {
			return
		}
		if end.After(until) {
			until = end
		}
		for _, g := range list[:n] {
			if g == generation {
				return
			}
		}
		list[n] = generation
		n++
	}
	if s.PreviousUntil > 0 {
		add(max(s.Previous, r.Generation), own)
	}
	if !fleet.IsZero() {
		add(max(s.Generation, r.Previous), fleet)
		if s.PreviousUntil > 0 {
			end := own
			if fleet.Before(own) {
				end = fleet
			}
			add(max(s.Previous, r.Previous), end)
		}
	}
	return list, n, until
}

// Accepts tells whether credentials of this generation are valid, and the device
// is not revoked.
func (s *Secrets) Accepts(generation int64, r Rotation, now time.Time) bool {
	list, n, _ := s.Valid(r, now)
	for _, g := range list[:n] {
		if g == generation {
			return !s.Revoked
		}
	}
	return false
}
