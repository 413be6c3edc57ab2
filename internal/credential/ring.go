package credential

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// SwitchDelay is how long a node goes on signing what it sends to other nodes with
// the previous secret: they may not have read of the new one yet.
const SwitchDelay = 10 * time.Second

// SealedSecret is a secret that replaced the one before it, as the fleet keeps it:
// sealed under the secret of the settings.
type SealedSecret struct {
	Number int64  // 1 for the first rotation
	Since  int64  // the generation of device credentials from which it mints them
	Sealed string // by NewSecret
}

// Rotation is which secrets a fleet has beside the one of its settings, number 0.
type Rotation struct {
	// Admin is the number of the admin token: each has another.
	Admin int64
	// Secrets are in order of Number and Since.
	Secrets []SealedSecret
	// PreviousUntil is when the last but one ends for all that has an expiry or is
	// signed; device credentials end with their generation.
	PreviousUntil time.Time
}

// ring is what a Mint mints with.
type ring struct {
	secrets       []numbered // at least the first
	admin         string
	previousUntil time.Time
	switchAt      time.Time // from then on the last one signs
}

type numbered struct {
	number, since int64
	secret        []byte
}

func (r *ring) last() []byte { return r.secrets[len(r.secrets)-1].secret }

// previous is the last but one; nil if there is none, or it has ended.
func (r *ring) previous(now time.Time) []byte {
	if len(r.secrets) < 2 || !now.Before(r.previousUntil) {
		return nil
	}
	return r.secrets[len(r.secrets)-2].secret
}

// valid are the secrets that what is signed may be signed with, the newest first.
func (r *ring) valid(now time.Time) [2][]byte { return [2][]byte{r.last(), r.previous(now)} }

// signing is the secret to sign with for other nodes.
func (r *ring) signing(now time.Time) []byte {
	if previous := r.previous(now); previous != nil && now.Before(r.switchAt) {
		return previous
	}
	return r.last()
}

// of is the secret of a generation of device credentials.
func (r *ring) of(generation int64) []byte {
	for i := len(r.secrets) - 1; i > 0; i-- {
		if r.secrets[i].since <= generation {
			return r.secrets[i].secret
		}
	}
	return r.secrets[0].secret
}

// NewSecret makes a secret of a number and returns it sealed, for [Mint.Adopt] of
// every node of the fleet.
func (m *Mint) NewSecret(number int64) string {
	var secret [32]byte
	rand.Read(secret[:]) // never fails (crypto/rand)
	return seal(m.first(), "secret", strconv.FormatInt(number, 10), secret[:])
}

// Adopt takes the fleet's secrets. now is when this node learned of them, zero if
// the others have known them for long. It fails, and changes nothing, if one cannot
// be opened: it was sealed under another secret than that of the settings.
func (m *Mint) Adopt(rotation Rotation, now time.Time) error {
	next := &ring{secrets: []numbered{{secret: m.first()}}, previousUntil: rotation.PreviousUntil}
	for _, s := range rotation.Secrets {
		secret, err := open(m.first(), "secret", strconv.FormatInt(s.Number, 10), s.Sealed)
		if err != nil {
			return fmt.Errorf("secret %d of the fleet cannot be opened with the secret of the settings: %w", s.Number, err)
		}
		next.secrets = append(next.secrets, numbered{s.Number, s.Since, secret})
	}
	next.admin = adminToken(next.last(), rotation.Admin, len(rotation.Secrets) > 0)
	m.adopting.Lock()
	defer m.adopting.Unlock()
	old := m.ring.Load()
	if next.switchAt = old.switchAt; len(old.secrets) < len(next.secrets) && !now.IsZero() {
		next.switchAt = now.Add(SwitchDelay)
	}
	m.ring.Store(next)
	return nil
}

// adminToken is HMAC-SHA256(secret, "admin") until the first rotation, as it was
// before there were any.
func adminToken(secret []byte, number int64, rotated bool) string {
	if number == 0 && !rotated {
		h := hmac.New(sha256.New, secret)
		h.Write([]byte("admin"))
		return hex.EncodeToString(h.Sum(nil))
	}
	return hex.EncodeToString(sum(secret, "admin token", strconv.FormatInt(number, 10)))
}

// Number is that of the newest secret; 0: the one of the settings.
func (m *Mint) Number() int64 {
	secrets := m.ring.Load().secrets
	return secrets[len(secrets)-1].number
}

// Reseal returns what Seal took sealed under the newest secret; changed is false if
// it is already. The error is that of Open.
func (m *Mint) Reseal(purpose, name, sealed string) (again string, changed bool, err error) {
	if number, _ := numberOf(sealed); number == m.Number() {
		return sealed, false, nil
	}
	plain, err := m.Open(purpose, name, sealed)
	if err != nil {
		return "", false, err
	}
	return m.Seal(purpose, name, plain), true, nil
}

// mark stands between the number of the secret and what is sealed under it. What
// is sealed under number 0 has none.
const mark = ":"

func numberOf(sealed string) (number int64, box string) {
	text, box, found := strings.Cut(sealed, mark)
	if !found {
		return 0, sealed
	}
	number, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return -1, box // of no secret
	}
	return number, box
}
