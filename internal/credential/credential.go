// Package credential creates and verifies the credentials of fleetd: device tokens, upload tokens,
// snapshot tokens and the admin token. It also encrypts values that are stored in the database.
//
// All of them derive from one secret with HMAC-SHA256 (RFC 2104): every node of a fleet has the secret and
// verifies them from memory, without the database. The first signed field is the purpose; fields are
// length-prefixed, so that different lists of fields have different signatures. Comparisons take constant
// time.
package credential

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/clock"
)

// MinSecret is the shortest secret accepted, in bytes.
const MinSecret = 16

// Errors of the verifiers.
var (
	ErrSecretShort = fmt.Errorf("the secret must have at least %d bytes", MinSecret)
	ErrInvalid     = errors.New("credential is not valid")
	ErrExpired     = errors.New("credential has expired")
)

// Mint creates and verifies credentials of one fleet. It is safe for concurrent use; its only state are
// the fleet's secrets.
type Mint struct {
	ring     atomic.Pointer[ring]
	adopting sync.Mutex // serializes changes of ring
}

// New returns the Mint of a fleet with this secret.
func New(secret []byte) (*Mint, error) {
	if len(secret) < MinSecret {
		return nil, ErrSecretShort
	}
	m := &Mint{}
	first := &key{secret: bytes.Clone(secret)}
	m.ring.Store(&ring{secrets: []numbered{{secret: first}}, admin: adminToken(first, 0, false)})
	return m, nil
}

// NewSecret returns 32 random bytes as 64 hex digits, for a new fleet.
func NewSecret() string {
	var b [32]byte
	rand.Read(b[:]) // never fails (crypto/rand)
	return hex.EncodeToString(b[:])
}

// first returns the secret of the settings.
func (m *Mint) first() *key { return m.ring.Load().secrets[0].secret }

// AdminToken returns the admin token: 64 hex digits, the same on every node.
func (m *Mint) AdminToken() string { return m.ring.Load().admin }

// IsAdmin reports whether token is the admin token.
func (m *Mint) IsAdmin(token string) bool {
	var given, want [2 * sha256.Size]byte // on the stack: a conversion would allocate for every request
	copy(given[:], token)
	admin := m.AdminToken()
	copy(want[:], admin)
	return len(token) == len(admin) && subtle.ConstantTimeCompare(given[:], want[:]) == 1
}

// Fingerprint identifies the secret of the settings without revealing it: nodes compare it to check that
// they belong to one fleet.
func (m *Mint) Fingerprint() string {
	signature := sum(m.first(), "fingerprint")
	return hex.EncodeToString(signature[:8])
}

// DeviceToken returns the token that the OTA reply contains and the device presents at its WebSocket
// upgrade: 43 characters of base64url. It is the same at every check while the arguments are the same, so
// that devices do not rewrite their flash.
func (m *Mint) DeviceToken(device, clientID string, generation int64) string {
	token := tokenOf(sum(m.ring.Load().of(generation), "device", device, clientID, fmt.Sprint(generation)))
	return string(token[:])
}

// IsDevice reports whether token is the DeviceToken of the other arguments.
func (m *Mint) IsDevice(token, device, clientID string, generation int64) bool {
	return subtle.ConstantTimeCompare([]byte(token), []byte(m.DeviceToken(device, clientID, generation))) == 1
}

// userMark precedes a Client-Id, which may be empty, in an MQTT user name, which must not be empty if there
// is a password (MQTT 3.1.1, 3.1.2.9).
const userMark = "client:"

// MQTTUser returns the MQTT user name of a device with this Client-Id. Its client id is the device's, its
// password DeviceToken.
func MQTTUser(clientID string) string { return userMark + clientID }

// ClientOfUser returns the Client-Id in an MQTT user name of MQTTUser.
func ClientOfUser(username string) (clientID string, ok bool) {
	return strings.CutPrefix(username, userMark)
}

// UploadToken returns the bearer token of one device's photo uploads, valid until expires (whole seconds).
func (m *Mint) UploadToken(device string, expires time.Time) string {
	return m.expiring("upload", device, "", expires)
}

// VerifyUpload returns ErrInvalid or ErrExpired unless token is an UploadToken of the device.
func (m *Mint) VerifyUpload(token, device string, now time.Time) error {
	return m.verify("upload", token, device, "", now)
}

// SnapshotToken returns a token for one upload of the photo with this id by the device. It is safe in a URL
// path: base64url, without colons.
func (m *Mint) SnapshotToken(device, photo string, expires time.Time) string {
	inner := m.expiring("snapshot", device, photo, expires)
	return base64.RawURLEncoding.EncodeToString([]byte(device+" "+photo)) + "." + inner
}

// VerifySnapshot returns the device and photo id of a SnapshotToken, or ErrInvalid or ErrExpired. The caller
// must ensure that it is used once.
func (m *Mint) VerifySnapshot(token string, now time.Time) (device, photo string, err error) {
	name, proof, found := strings.Cut(token, ".")
	named, err := base64.RawURLEncoding.DecodeString(name)
	if !found || err != nil {
		return "", "", ErrInvalid
	}
	device, photo, found = strings.Cut(string(named), " ")
	if !found {
		return "", "", ErrInvalid
	}
	return device, photo, m.verify("snapshot", proof, device, photo, now)
}

// Code returns a new code, valid until expires (whole seconds) on any node: 26 random characters, and a signature by which wrong
// codes are refused without reading the database. It is safe in a URL path.
func (m *Mint) Code(purpose string, expires time.Time) string {
	text := rand.Text()
	return text + "." + m.expiring(purpose, "", text, expires)
}

// Successors returns the code that follows another one. It is the same on every node while the fleet's secret is; during
// the grace of the previous secret, the code that this one gave is the second.
func (m *Mint) Successors(purpose, code string, expires, now time.Time) (codes []string) {
	for _, secret := range m.ring.Load().valid(now) {
		if secret != nil {
			text := tokenOf(sum(secret, "successor", purpose, code))
			codes = append(codes, string(text[:])+"."+expiring(secret, purpose, "", string(text[:]), expires))
		}
	}
	return codes
}

// VerifyCode returns ErrInvalid or ErrExpired unless code is one of this purpose. Where a code works once, the caller ensures that.
func (m *Mint) VerifyCode(purpose, code string, now time.Time) error {
	text, proof, _ := strings.Cut(code, ".")
	return m.verify(purpose, proof, "", text, now)
}

// HopSignature signs a request from one node to another, which trusts the caller in it.
func (m *Mint) HopSignature(device, kind, body string) string {
	token := tokenOf(sum(m.ring.Load().signing(clock.Now()), "hop", device, kind, body))
	return string(token[:])
}

// IsHop reports whether signature is the HopSignature of the other arguments.
func (m *Mint) IsHop(signature, device, kind, body string) bool {
	var given [tokenSize]byte // on the stack: a conversion would allocate for every hop
	copy(given[:], signature)
	for _, secret := range m.ring.Load().valid(clock.Now()) {
		if secret == nil {
			continue
		}
		if token := tokenOf(sum(secret, "hop", device, kind, body)); len(signature) == tokenSize && subtle.ConstantTimeCompare(given[:], token[:]) == 1 {
			return true
		}
	}
	return false
}

// AuditKey returns the key for the hashes of the audit log. It derives from the secret of the settings, even
// after rotations, so that old entries can be verified with that secret alone.
func (m *Mint) AuditKey() []byte {
	key := sum(m.first(), "audit")
	return key[:]
}

// RosterKey returns the key for the hashes of ids and clients in a node's roster.
func (m *Mint) RosterKey() (key [16]byte) {
	signature := sum(m.first(), "roster")
	copy(key[:], signature[:])
	return key
}

// Seal encrypts a value of the fleet, so that a database or backup alone does not reveal it: AES-256-GCM
// with a random nonce, and a key that derives from the secret and the purpose. name identifies the value;
// it cannot be opened with another name.
func (m *Mint) Seal(purpose, name string, plain []byte) string {
	r := m.ring.Load()
	sealed := seal(r.last(), purpose, name, plain)
	if number := r.secrets[len(r.secrets)-1].number; number > 0 {
		return strconv.FormatInt(number, 10) + mark + sealed
	}
	return sealed
}

// Open decrypts the result of Seal. ErrInvalid means another secret, purpose or name, or a modified value.
func (m *Mint) Open(purpose, name, sealed string) ([]byte, error) {
	number, box := numberOf(sealed)
	for _, s := range m.ring.Load().secrets {
		if s.number == number {
			return open(s.secret, purpose, name, box)
		}
	}
	return nil, ErrInvalid
}

// Purposes of tickets.
const (
	cursorTicket = "cursor"
	accessTicket = "access"
	clientTicket = "client"
)

// Cursor seals a place in a list: who reads the list learns nothing of its other rows from the cursor, and cannot
// alter it. list names the list with its filters and its order; [Mint.Place] opens the cursor under the same name
// alone. The result is base64url without padding.
func (m *Mint) Cursor(list, place string, now time.Time) string {
	return m.ticket(cursorTicket, list, place, now)
}

// Place opens the result of [Mint.Cursor] of any node. Cursors of the previous secret are valid during its grace.
// ErrInvalid means another list, another secret, or a modified cursor.
func (m *Mint) Place(list, cursor string, now time.Time) (string, error) {
	valid := m.ring.Load().valid(now)
	return openTicket(cursorTicket, list, cursor, valid[:])
}

// AccessToken seals a grant's id, the resource that the token opens, and its end (whole seconds).
func (m *Mint) AccessToken(grant, resource string, expires, now time.Time) string {
	return m.ticket(accessTicket, "", strconv.FormatInt(expires.Unix(), 10)+" "+grant+" "+resource, now)
}

// OpenAccessToken opens the result of [Mint.AccessToken]. ErrExpired means that the token was valid once.
func (m *Mint) OpenAccessToken(token string, now time.Time) (grant, resource string, err error) {
	valid := m.ring.Load().valid(now)
	text, err := openTicket(accessTicket, "", token, valid[:])
	if err != nil {
		return "", "", err
	}
	end, rest, _ := strings.Cut(text, " ")
	grant, resource, _ = strings.Cut(rest, " ")
	if seconds, err := strconv.ParseInt(end, 10, 64); err != nil || now.Unix() >= seconds {
		return grant, resource, ErrExpired
	}
	return grant, resource, nil
}

// ClientID seals the metadata of a registered application: nothing of it is stored.
func (m *Mint) ClientID(metadata string, now time.Time) string {
	return m.ticket(clientTicket, "", metadata, now)
}

// OpenClientID opens the result of [Mint.ClientID], or returns ErrInvalid. Those of all secrets are valid: an application cannot be
// told of a new client_id, and whoever has an old secret could as well register.
func (m *Mint) OpenClientID(id string) (metadata string, err error) {
	var secrets []*key
	for _, s := range m.ring.Load().secrets {
		secrets = append(secrets, s.secret)
	}
	return openTicket(clientTicket, "", id, secrets)
}

// ticket seals a text for a purpose, under a name. The result is base64url without padding.
func (m *Mint) ticket(purpose, name, text string, now time.Time) string {
	return base64.RawURLEncoding.EncodeToString(boxOf(m.ring.Load().signing(now), purpose).Seal(nil, nil, []byte(text), []byte(name)))
}

// openTicket opens the result of ticket of any node that has one of these secrets; nil ones are left out.
func openTicket(purpose, name, ticket string, secrets []*key) (string, error) {
	box, err := base64.RawURLEncoding.DecodeString(ticket)
	if err != nil {
		return "", ErrInvalid
	}
	for _, secret := range secrets {
		if secret == nil {
			continue
		}
		if text, err := boxOf(secret, purpose).Open(nil, nil, box, []byte(name)); err == nil {
			return string(text), nil
		}
	}
	return "", ErrInvalid
}

// Settings returns the Mint of the secret of the settings alone, for values that are opened before the
// fleet's other secrets are read.
func (m *Mint) Settings() *Mint {
	first, _ := New(m.first().secret) // its length was checked before
	return first
}

func seal(secret *key, purpose, name string, plain []byte) string {
	return base64.RawStdEncoding.EncodeToString(boxOf(secret, purpose).Seal(nil, nil, plain, []byte(name)))
}

func open(secret *key, purpose, name, sealed string) ([]byte, error) {
	box, err := base64.RawStdEncoding.DecodeString(sealed)
	if err != nil {
		return nil, ErrInvalid
	}
	plain, err := boxOf(secret, purpose).Open(nil, nil, box, []byte(name))
	if err != nil {
		return nil, ErrInvalid
	}
	return plain, nil
}

func boxOf(secret *key, purpose string) cipher.AEAD {
	derived := sum(secret, "seal", purpose)
	block, err := aes.NewCipher(derived[:])
	if err != nil {
		panic(err) // 32 bytes are a valid key
	}
	box, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		panic(err) // AES has the block size of GCM
	}
	return box
}

// expiring returns base64url of eight bytes of expiry and sixteen of MAC.
func (m *Mint) expiring(purpose, device, object string, expires time.Time) string {
	return expiring(m.ring.Load().last(), purpose, device, object, expires)
}

func expiring(secret *key, purpose, device, object string, expires time.Time) string {
	var b [24]byte
	binary.BigEndian.PutUint64(b[:], uint64(expires.Unix()))
	signature := sum(secret, purpose, device, object, string(b[:8]))
	copy(b[8:], signature[:])
	return base64.RawURLEncoding.EncodeToString(b[:])
}

func (m *Mint) verify(purpose, token, device, object string, now time.Time) error {
	b, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil || len(b) != 24 {
		return ErrInvalid
	}
	signed := false
	for _, secret := range m.ring.Load().valid(now) {
		if secret == nil {
			continue
		}
		if signature := sum(secret, purpose, device, object, string(b[:8])); subtle.ConstantTimeCompare(b[8:], signature[:16]) == 1 {
			signed = true
		}
	}
	if !signed {
		return ErrInvalid
	}
	if now.Unix() >= int64(binary.BigEndian.Uint64(b)) {
		return ErrExpired
	}
	return nil
}

// key is one secret. It keeps hash states that have processed the secret: for a short text that is half of the
// work of a signature.
type key struct {
	secret []byte
	states sync.Pool // of *state
}

type state struct {
	mac       hash.Hash
	text      []byte
	signature [sha256.Size]byte
}

// maxStateText is the largest text for which a state is kept, in bytes: one large hop must not hold memory for
// ever.
const maxStateText = 4096

// sum signs the fields. The purpose is a prefix, so that a token of one kind is never valid as another
// kind, nor as the admin token.
func sum(k *key, purpose string, fields ...string) [sha256.Size]byte {
	s, _ := k.states.Get().(*state)
	if s == nil {
		s = &state{mac: hmac.New(sha256.New, k.secret)}
	}
	s.text = appendField(s.text[:0], "fleetd "+purpose)
	for _, field := range fields {
		s.text = appendField(s.text, field)
	}
	s.mac.Reset()
	s.mac.Write(s.text)
	s.mac.Sum(s.signature[:0])
	signature := s.signature
	if cap(s.text) <= maxStateText {
		k.states.Put(s)
	}
	return signature
}

func appendField(dst []byte, field string) []byte {
	return append(binary.BigEndian.AppendUint32(dst, uint32(len(field))), field...)
}

// tokenSize is the length of a whole signature as text.
const tokenSize = (sha256.Size*8 + 5) / 6

func tokenOf(signature [sha256.Size]byte) (token [tokenSize]byte) {
	base64.RawURLEncoding.Encode(token[:], signature[:])
	return token
}
