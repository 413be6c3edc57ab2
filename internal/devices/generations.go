package devices

import (
	"slices"
	"time"

	"fleetd/internal/clock"
)

// Rotation is the lowest generation of all devices of the fleet. It is one record for
// all of them, so that a rotation of the fleet writes one row and sends one message,
// however many devices there are.
type Rotation struct {
	Generation    int64     `json:"generation"`
	Previous      int64     `json:"previous"` // also valid until PreviousUntil
	PreviousUntil time.Time `json:"previous_until"`
	// Secrets are the secrets that replaced the one of the settings, oldest first; each is
	// sealed with that one. Admin is the number of the admin token.
	Secrets []SealedSecret `json:"secrets,omitempty"`
	Admin   int64          `json:"admin,omitempty"`
}

// SealedSecret is a stored secret of the fleet.
type SealedSecret struct {
	Number int64     `json:"number"` // from 1
	Since  int64     `json:"since"`  // first generation whose credentials derive from it
	Sealed string    `json:"sealed"`
	At     time.Time `json:"at"`
}

// MaxSecrets is how many times the fleet's secret can be rotated.
const MaxSecrets = 1000

// Secret returns the number of the newest secret; 0 is that of the settings.
func (r *Rotation) Secret() int64 {
	if len(r.Secrets) == 0 {
		return 0
	}
	return r.Secrets[len(r.Secrets)-1].Number
}

// NextGeneration returns the rotation to a new generation of all devices. highest is the
// highest generation of a single device. The current generation stays valid until a
// time, older ones do not.
func (r Rotation) NextGeneration(highest int64, now, until time.Time) (Rotation, error) {
	if now.Before(r.PreviousUntil) {
		return r, Errorf(CodeForbidden, "the fleet was rotated already, and the old credentials end at %s; rotate again after that, or rotate or revoke single devices",
			r.PreviousUntil.UTC().Format(time.RFC3339))
	}
	r.Generation, r.Previous, r.PreviousUntil = max(r.Generation, highest)+1, r.Generation, until.UTC().Truncate(time.Microsecond)
	return r, nil
}

// AddSecret adds a new secret, for the generation of the rotation and later ones. seal
// returns the sealed secret with a number.
func (r Rotation) AddSecret(now time.Time, seal func(number int64) string) (Rotation, error) {
	if len(r.Secrets) >= MaxSecrets {
		return r, Errorf(CodeForbidden, "the secret was rotated %d times, the maximum", MaxSecrets)
	}
	number := r.Secret() + 1
	r.Secrets = append(slices.Clone(r.Secrets), SealedSecret{Number: number, Since: r.Generation, Sealed: seal(number), At: now.UTC()})
	return r, nil
}

// Credentials describes which credentials of a device are valid.
type Credentials struct {
	Generation    int64
	PreviousUntil time.Time // older ones are also valid until then; zero: they are not
}

// Generations are a device's own generations of credentials. Its methods also need the
// rotation of the fleet. It is not safe for concurrent use.
type Generations struct {
	Generation    int64
	Revoked       bool
	Previous      int64
	PreviousUntil int64 // unix microseconds; until then Previous is also valid
	Confirmed     int64 // the highest generation that the device connected with
}

// GenerationsOf returns the generations of a stored exception.
func GenerationsOf(x Exception) Generations {
	return Generations{Generation: x.Generation, Revoked: x.Revoked, Previous: x.Previous, PreviousUntil: clock.Micros(x.PreviousUntil)}
}

// Current returns the generation of the credentials that the device gets.
func (s *Generations) Current(r Rotation) int64 { return max(s.Generation, r.Generation) }

// maxValid is how many generations can be valid at once: two of the device and two of the
// fleet.
const maxValid = 4

// Valid returns the generations whose credentials are valid, newest first, and until
// when there is more than one. A connection with a newer generation ends older ones. It
// ignores Revoked.
func (s *Generations) Valid(r Rotation, now time.Time) (list [maxValid]int64, n int, until time.Time) {
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

// Accepts reports whether credentials of this generation are valid and the device is not
// revoked.
func (s *Generations) Accepts(generation int64, r Rotation, now time.Time) bool {
	list, n, _ := s.Valid(r, now)
	for _, g := range list[:n] {
		if g == generation {
			return !s.Revoked
		}
	}
	return false
}
