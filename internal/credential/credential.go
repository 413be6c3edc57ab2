// Package credential mints and verifies everything that opens a door of
// fleetd: device tokens, upload tokens, snapshot tokens and the admin token. It
// also seals what others keep in the database.
//
// All of them derive from one secret with HMAC-SHA256 (RFC 2104), so every
// node of a fleet that shares the secret verifies them from memory, with no
// database. Purposes are kept apart by the first field of the signed text;
// fields are length-prefixed, so no two different lists of fields sign alike.
// Comparisons take constant time.
package credential

import (
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
	"strings"
	"time"
)

// MinSecret is the shortest secret accepted, in bytes.
const MinSecret = 16

// Errors of the verifiers.
var (
	ErrSecretShort = fmt.Errorf("the secret must have at least %d bytes", MinSecret)
	ErrInvalid     = errors.New("credential is not valid")
	ErrExpired     = errors.New("credential has expired")
)

// Mint makes and checks credentials of one fleet. It is safe for concurrent
// use and holds no state but the secret.
type Mint struct {
	secret []byte
	admin  string
}

// New returns the mint of a fleet with this secret.
func New(secret []byte) (*Mint, error) {
	if len(secret) < MinSecret {
		return nil, ErrSecretShort
	}
	h := hmac.New(sha256.New, secret)
	h.Write([]byte("admin"))
	return &Mint{secret: append([]byte(nil), secret...), admin: hex.EncodeToString(h.Sum(nil))}, nil
}

// NewSecret returns 32 random bytes as 64 hex digits, for a fleet that has
// none yet.
func NewSecret() string {
	var b [32]byte
	rand.Read(b[:]) // never fails (crypto/rand)
	return hex.EncodeToString(b[:])
}

// AdminToken is HMAC-SHA256(secret, "admin") in 64 hex digits: the same on
// every node.
func (m *Mint) AdminToken() string { return m.admin }

// IsAdmin tells whether token is the admin token.
func (m *Mint) IsAdmin(token string) bool {
	var given, want [2 * sha256.Size]byte // on the stack: a conversion would allocate for every request
	copy(given[:], token)
	copy(want[:], m.admin)
	return len(token) == len(m.admin) && subtle.ConstantTimeCompare(given[:], want[:]) == 1
}

// Fingerprint names the secret without revealing it: nodes compare it to find
// out whether they belong to one fleet.
func (m *Mint) Fingerprint() string {
	return hex.EncodeToString(m.sum("fingerprint")[:8])
}

// DeviceToken is what the OTA reply gives a device and the device presents at
// its WebSocket upgrade: 43 characters of base64url. It is the same at every
// check as long as the arguments are, so that devices do not wear their flash.
func (m *Mint) DeviceToken(device, clientID string, generation int64) string {
	return base64.RawURLEncoding.EncodeToString(m.sum("device", device, clientID, fmt.Sprint(generation)))
}

// IsDevice tells whether token is DeviceToken of the other arguments.
func (m *Mint) IsDevice(token, device, clientID string, generation int64) bool {
	return subtle.ConstantTimeCompare([]byte(token), []byte(m.DeviceToken(device, clientID, generation))) == 1
}

// userMark stands in front of a Client-Id, which may be empty, in an MQTT user
// name, which must not be where there is a password (MQTT 3.1.1, 3.1.2.9).
const userMark = "client:"

// MQTTUser is the MQTT user name of a device with this Client-Id. Its client id
// is the device's, its password DeviceToken.
func MQTTUser(clientID string) string { return userMark + clientID }

// ClientOfUser is the Client-Id in an MQTT user name made by MQTTUser.
func ClientOfUser(username string) (clientID string, ok bool) {
	return strings.CutPrefix(username, userMark)
}

// UploadToken is the bearer token of one device's photo uploads, valid until
// expires (whole seconds).
func (m *Mint) UploadToken(device string, expires time.Time) string {
	return m.expiring("upload", device, "", expires)
}

// VerifyUpload returns ErrInvalid or ErrExpired unless token is an
// UploadToken of the device.
func (m *Mint) VerifyUpload(token, device string, now time.Time) error {
	return m.verify("upload", token, device, "", now)
}

// SnapshotToken allows one upload of the photo with this id for the device. It
// is safe in a URL path: base64url, no colon.
func (m *Mint) SnapshotToken(device, photo string, expires time.Time) string {
	inner := m.expiring("snapshot", device, photo, expires)
	return base64.RawURLEncoding.EncodeToString([]byte(device+" "+photo)) + "." + inner
}

// VerifySnapshot returns the device and photo id of a SnapshotToken, or
// ErrInvalid or ErrExpired. That it is used once is for the caller to ensure.
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

// HopSignature signs a call that one node passes to another: the receiver
// acts on it without asking who the caller was.
func (m *Mint) HopSignature(device, kind string, body []byte) string {
	return base64.RawURLEncoding.EncodeToString(m.sum("hop", device, kind, string(body)))
}

// IsHop tells whether signature is HopSignature of the other arguments.
func (m *Mint) IsHop(signature, device, kind string, body []byte) bool {
	return subtle.ConstantTimeCompare([]byte(signature), []byte(m.HopSignature(device, kind, body))) == 1
}

// AuditKey is the key under which the fleet's record is hashed.
func (m *Mint) AuditKey() []byte { return m.sum("audit") }

// RosterKey keys the hashes of ids and clients in a node's roster.
func (m *Mint) RosterKey() (key [16]byte) {
	copy(key[:], m.sum("roster"))
	return key
}

// Seal encrypts what the fleet keeps for itself, so that a database or a backup
// alone does not give it away: AES-256-GCM with a random nonce, under a key that
// derives from the secret and the purpose. name is what it belongs to; it cannot
// be opened under another.
func (m *Mint) Seal(purpose, name string, plain []byte) string {
	box := m.box(purpose).Seal(nil, nil, plain, []byte(name))
	return base64.RawStdEncoding.EncodeToString(box)
}

// Open returns what Seal took, or ErrInvalid: another secret, purpose or name,
// or somebody changed it.
func (m *Mint) Open(purpose, name, sealed string) ([]byte, error) {
	box, err := base64.RawStdEncoding.DecodeString(sealed)
	if err != nil {
		return nil, ErrInvalid
	}
	plain, err := m.box(purpose).Open(nil, nil, box, []byte(name))
	if err != nil {
		return nil, ErrInvalid
	}
	return plain, nil
}

func (m *Mint) box(purpose string) cipher.AEAD {
	block, err := aes.NewCipher(m.sum("seal", purpose))
	if err != nil {
		panic(err) // 32 bytes are a key
	}
	box, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		panic(err) // AES has the block size that GCM needs
	}
	return box
}

// expiring is base64url of eight bytes of expiry and sixteen of MAC.
func (m *Mint) expiring(purpose, device, object string, expires time.Time) string {
	var b [24]byte
	binary.BigEndian.PutUint64(b[:], uint64(expires.Unix()))
	copy(b[8:], m.sum(purpose, device, object, string(b[:8])))
	return base64.RawURLEncoding.EncodeToString(b[:])
}

func (m *Mint) verify(purpose, token, device, object string, now time.Time) error {
	b, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil || len(b) != 24 {
		return ErrInvalid
	}
	want := m.sum(purpose, device, object, string(b[:8]))
	if subtle.ConstantTimeCompare(b[8:], want[:16]) != 1 {
		return ErrInvalid
	}
	if now.Unix() >= int64(binary.BigEndian.Uint64(b)) {
		return ErrExpired
	}
	return nil
}

// sum signs the fields. The purpose is prefixed so that no token of one kind
// is ever a token of another, nor the admin token.
func (m *Mint) sum(purpose string, fields ...string) []byte {
	h := hmac.New(sha256.New, m.secret)
	var n [4]byte
	write := func(field string) {
		binary.BigEndian.PutUint32(n[:], uint32(len(field)))
		h.Write(n[:])
		h.Write([]byte(field))
	}
	write("fleetd " + purpose)
	for _, field := range fields {
		write(field)
	}
	return h.Sum(nil)
}
