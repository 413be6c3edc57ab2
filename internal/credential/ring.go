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

// SwitchDelay is how long a node continues to sign messages to other nodes with the previous secret: they may
// not have the new one yet.
const SwitchDelay = 10 * time.Second

// SealedSecret is a secret that replaced another one, as stored: sealed with the secret of the settings.
type SealedSecret struct {
	Number int64  // 1 for the first rotation
	Since  int64  // the first generation of device credentials that derives from it
	Sealed string // by NewSecret
}

// Rotation contains the secrets of a fleet in addition to the one of its settings, number 0.
type Rotation struct {
	// Admin is the number of the admin token: each number has another token.
	Admin int64
	// Secrets are in order of Number and Since.
	Secrets []SealedSecret
	// PreviousUntil is when the previous secret ends for expiring and signed values; device credentials
	// end with their generation.
	PreviousUntil time.Time
}

// ring holds the secrets of a Mint.
type ring struct {
	secrets       []numbered // at least the first
	admin         string
	previousUntil time.Time
	switchAt      time.Time // from then on the last one signs
}

type numbered struct {
	number, since int64
	secret        *key
}

func (r *ring) last() *key { return r.secrets[len(r.secrets)-1].secret }

// previous returns the previous secret; nil if there is none, or it has ended.
func (r *ring) previous(now time.Time) *key {
	if len(r.secrets) < 2 || !now.Before(r.previousUntil) {
		return nil
	}
	return r.secrets[len(r.secrets)-2].secret
}

// valid returns the secrets whose signatures are valid, newest first.
func (r *ring) valid(now time.Time) [2]*key { return [2]*key{r.last(), r.previous(now)} }

// signing returns the secret that signs messages to other nodes.
func (r *ring) signing(now time.Time) *key {
	if previous := r.previous(now); previous != nil && now.Before(r.switchAt) {
		return previous
	}
	return r.last()
}

// of returns the secret of a generation of device credentials.
func (r *ring) of(generation int64) *key {
	for i := len(r.secrets) - 1; i > 0; i-- {
		if r.secrets[i].since <= generation {
			return r.secrets[i].secret
		}
	}
	return r.secrets[0].secret
}

// NewSecret creates the secret with a number and returns it sealed, for [Mint.Adopt] on every node of the
// fleet.
func (m *Mint) NewSecret(number int64) string {
	var secret [32]byte
	rand.Read(secret[:]) // never fails (crypto/rand)
	return seal(m.first(), "secret", strconv.FormatInt(number, 10), secret[:])
}

// Adopt sets the fleet's secrets. now is when this node received them, zero if the other nodes have had them
// for long. It fails, and changes nothing, if one cannot be opened: it was sealed with another secret than
// that of the settings.
func (m *Mint) Adopt(rotation Rotation, now time.Time) error {
	next := &ring{secrets: []numbered{{secret: m.first()}}, previousUntil: rotation.PreviousUntil}
	for _, s := range rotation.Secrets {
		secret, err := open(m.first(), "secret", strconv.FormatInt(s.Number, 10), s.Sealed)
		if err != nil {
			return fmt.Errorf("secret %d of the fleet cannot be opened with --secret; give this node the secret of the fleet: %w", s.Number, err)
		}
		next.secrets = append(next.secrets, numbered{s.Number, s.Since, &key{secret: secret}})
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

// adminToken returns HMAC-SHA256(secret, "admin") until the first rotation.
func adminToken(secret *key, number int64, rotated bool) string {
	if number == 0 && !rotated {
		h := hmac.New(sha256.New, secret.secret)
		h.Write([]byte("admin"))
		return hex.EncodeToString(h.Sum(nil))
	}
	token := sum(secret, "admin token", strconv.FormatInt(number, 10))
	return hex.EncodeToString(token[:])
}

// Number returns the number of the newest secret; 0 is that of the settings.
func (m *Mint) Number() int64 {
	secrets := m.ring.Load().secrets
	return secrets[len(secrets)-1].number
}

// Reseal seals a sealed value with the newest secret; changed is false if it was already. The error is that
// of Open.
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

// mark separates the number of the secret from the value sealed with it. Values sealed with number 0 have
// none.
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
