package devices

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"math/big"
	"sync"
	"time"
)

// pendings holds the activation codes of devices that wait for approval. They
// live in memory only: a device repeats its check every half minute and speaks
// a new code after a restart.
type pendings struct {
	mu       sync.Mutex
	byDevice map[ID]*pending
	codes    map[string]ID
	wrong    int // codes tried in vain since wrongFrom
	wrongAt  time.Time
}

type pending struct {
	clientID  string
	code      string
	challenge string
	expires   time.Time
}

func newPendings() *pendings {
	return &pendings{byDevice: map[ID]*pending{}, codes: map[string]ID{}}
}

// get returns the code of a waiting device, a fresh one if it has none, an
// expired one, or another client asks.
func (p *pendings) get(id ID, clientID string, now time.Time) (found pending, fresh bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if old := p.byDevice[id]; old != nil {
		if old.clientID == clientID && now.Before(old.expires) {
			return *old, false, nil
		}
		p.dropLocked(id)
	}
	if len(p.byDevice) >= MaxPending {
		for other, old := range p.byDevice {
			if !now.Before(old.expires) {
				p.dropLocked(other)
			}
		}
		if len(p.byDevice) >= MaxPending {
			return pending{}, false, fail(CodeUnavailable, "%d devices wait for approval already", MaxPending)
		}
	}
	next := &pending{clientID: clientID, code: p.unusedCode(), challenge: newChallenge(), expires: now.Add(CodeLife)}
	p.byDevice[id] = next
	p.codes[next.code] = id
	return *next, true, nil
}

// unusedCode draws until the code is free: with MaxPending of a million taken
// that is almost always the first.
func (p *pendings) unusedCode() string {
	for {
		n, err := rand.Int(rand.Reader, big.NewInt(1_000_000))
		if err != nil {
			panic(err) // crypto/rand never fails
		}
		code := fmt.Sprintf("%06d", n)
		if _, taken := p.codes[code]; !taken {
			return code
		}
	}
}

func newChallenge() string {
	var b [16]byte
	rand.Read(b[:]) // never fails (crypto/rand)
	return hex.EncodeToString(b[:])
}

// byCode finds the device that speaks this code.
func (p *pendings) byCode(code string, now time.Time) (ID, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if now.Sub(p.wrongAt) > wrongCodeSpan {
		p.wrong, p.wrongAt = 0, now
	}
	if p.wrong >= MaxWrongCodes {
		return "", fail(CodeForbidden, "too many wrong codes; wait a minute, or approve the device by its id")
	}
	id, ok := p.codes[code]
	if !ok || !now.Before(p.byDevice[id].expires) {
		p.wrong++
		return "", fail(CodeDeviceUnknown, "no device waits with the code %s; codes live %v", code, CodeLife)
	}
	return id, nil
}

func (p *pendings) drop(id ID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dropLocked(id)
}

func (p *pendings) dropLocked(id ID) {
	if old := p.byDevice[id]; old != nil {
		delete(p.codes, old.code)
		delete(p.byDevice, id)
	}
}
