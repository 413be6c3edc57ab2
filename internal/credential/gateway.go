package credential

import (
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// MinSignatureKey is the minimum length of a signature key, in characters (xiaozhi-mqtt-gateway app.js,
// validateSignatureKeyComplexity).
const MinSignatureKey = 8

// weakWords must not be part of a signature key, ignoring case (same function).
var weakWords = [...]string{"test", "1234", "admin", "password", "qwerty", "xiaozhi"}

// Errors of NewGateway. They contain no part of the key.
var (
	ErrSignatureKeyShort = fmt.Errorf("the gateway's signature key has fewer than %d characters: %s", MinSignatureKey, changeKey)
	ErrSignatureKeyCase  = errors.New("the gateway's signature key needs an upper-case and a lower-case letter of a-z: " + changeKey)
	ErrSignatureKeyWeak  = errors.New("the gateway's signature key contains one of " + strings.Join(weakWords[:], ", ") + ": " + changeKey)
)

const changeKey = "choose another one, and give the same to fleetd and to whatever hands out the devices' MQTT settings (server.mqtt_signature_key)"

// gatewaySeparator separates the parts of a gateway's client id.
const gatewaySeparator = "@@@"

// UpstreamTestToken is the token that a gateway without a server secret presents to its chat server.
const UpstreamTestToken = "test-token"

// Gateway creates and verifies the credentials of xiaozhi-mqtt-gateway, so that devices and consoles keep
// those in their flash and settings. They derive from two keys of that product and are independent of Mint.
// It is safe for concurrent use.
type Gateway struct {
	key []byte
}

// NewGateway returns the Gateway of this signature key (MQTT_SIGNATURE_KEY), which must satisfy the gateway's
// own rules. Errors contain what to do, and not the key.
func NewGateway(signatureKey string) (*Gateway, error) {
	const lower, upper = "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
	if utf8.RuneCountInString(signatureKey) < MinSignatureKey {
		return nil, ErrSignatureKeyShort
	}
	if !strings.ContainsAny(signatureKey, lower) || !strings.ContainsAny(signatureKey, upper) {
		return nil, ErrSignatureKeyCase
	}
	for _, word := range weakWords {
		if strings.Contains(strings.ToLower(signatureKey), word) {
			return nil, ErrSignatureKeyWeak
		}
	}
	return &Gateway{key: []byte(signatureKey)}, nil
}

// IsGatewayID reports whether an MQTT client id is one of the gateway's: ids of fleetd never contain `@@@`.
func IsGatewayID(clientID string) bool { return strings.Contains(clientID, gatewaySeparator) }

// LoginName returns what an MQTT client id says of the device, for logs: a client id of the
// gateway also contains the Client-Id, which is a secret.
func LoginName(clientID string) string {
	if parts := strings.SplitN(clientID, gatewaySeparator, 3); len(parts) > 1 {
		return parts[1]
	}
	return clientID
}

// ParseGatewayID parses `GID@@@mac@@@uuid` or `GID@@@mac`, the MAC in any case and with `_`, `:`, `-` or
// nothing between its bytes, and returns the MAC as aa:bb:cc:dd:ee:ff; uuid is empty for two parts. It
// verifies nothing: consoles use these ids with any GID and uuid.
func ParseGatewayID(clientID string) (mac, uuid string, ok bool) {
	parts := strings.Split(clientID, gatewaySeparator)
	if len(parts) != 2 && len(parts) != 3 {
		return "", "", false
	}
	if mac, ok = macOf(parts[1]); !ok {
		return "", "", false
	}
	if len(parts) == 3 {
		uuid = parts[2]
	}
	return mac, uuid, true
}

// macOf parses a MAC address in one of the notations of ParseGatewayID.
func macOf(text string) (mac string, ok bool) {
	step := 2
	if len(text) == 17 && strings.IndexByte("_:-", text[2]) >= 0 {
		step = 3
	} else if len(text) != 12 {
		return "", false
	}
	var pairs []string
	for at := 0; at < len(text); at += step {
		if step == 3 && at > 0 && text[at-1] != text[2] {
			return "", false
		}
		pairs = append(pairs, text[at:at+2])
	}
	mac = strings.Join(pairs, ":")
	if _, err := hex.DecodeString(strings.ReplaceAll(mac, ":", "")); err != nil {
		return "", false
	}
	return strings.ToLower(mac), true
}

// Password returns the MQTT password of a client id and username: base64 with padding of
// HMAC-SHA256(signature key, "clientID|username"). The username is base64 of a JSON object chosen by the
// issuer, for example {"ip":"1.2.3.4"}.
func (g *Gateway) Password(clientID, username string) string {
	return base64.StdEncoding.EncodeToString(signature(g.key, clientID, username))
}

// Verify reports whether password belongs to the client id and username of a CONNECT, and returns the
// device's MAC address as aa:bb:cc:dd:ee:ff and the uuid. It accepts only ids of three parts,
// `GID@@@aa_bb_cc_dd_ee_ff@@@uuid`: the gateway accepts ids of two parts without a password, so from
// anybody. It takes constant time for ids and usernames of one length.
func (g *Gateway) Verify(clientID, username, password string) (mac, uuid string, ok bool) {
	signed := subtle.ConstantTimeCompare([]byte(password), []byte(g.Password(clientID, username))) == 1
	parts := strings.Split(clientID, gatewaySeparator)
	// The signed text joins the two with a bar: a bar in one of them could make this login valid for
	// another device.
	if strings.Contains(clientID, "|") || !isBase64(username) || len(clientID) > maxGatewayID {
		return "", "", false
	}
	if !signed || len(parts) != 3 || strings.Count(parts[1], "_") != 5 {
		return "", "", false
	}
	return ParseGatewayID(clientID)
}

// maxGatewayID is the longest client id; its parts have at most 64, 17 and 36 characters.
const maxGatewayID = 192

func isBase64(text string) bool {
	_, err := base64.StdEncoding.DecodeString(text)
	return text != "" && err == nil
}

// DailyToken returns the bearer token of the gateway's HTTP API for one day, in that day's time zone: hex of
// SHA-256("2006-01-02" + signature key).
func (g *Gateway) DailyToken(day time.Time) string {
	sum := sha256.Sum256(append([]byte(day.Format(time.DateOnly)), g.key...))
	return hex.EncodeToString(sum[:])
}

// IsDaily reports whether token is the daily token of yesterday, today or tomorrow in UTC. The gateway uses
// its local date, which is always one of these; its callers may be in any time zone. The duration reveals
// neither how much of a token is correct nor which day matched.
func (g *Gateway) IsDaily(token string, now time.Time) bool {
	match := 0
	for offset := -1; offset <= 1; offset++ {
		want := g.DailyToken(now.UTC().AddDate(0, 0, offset))
		match |= subtle.ConstantTimeCompare([]byte(token), []byte(want))
	}
	return match == 1
}

// UpstreamToken returns the bearer token with which a gateway opens a device's conversation at its chat
// server: base64url(HMAC-SHA256(server secret, "clientID|device|ts")) + "." + ts, where ts is now in Unix
// seconds. clientID is the uuid, device the MAC address with colons. secret is its SERVER_SECRET; without one
// it returns UpstreamTestToken.
func UpstreamToken(secret, clientID, device string, now time.Time) string {
	if secret == "" {
		return UpstreamTestToken
	}
	ts := strconv.FormatInt(now.Unix(), 10)
	return base64.RawURLEncoding.EncodeToString(signature([]byte(secret), clientID, device, ts)) + "." + ts
}

// signature signs fields joined like in the gateway. Unlike Mint's, the text is ambiguous if a field
// contains the separator; compatibility requires that.
func signature(key []byte, fields ...string) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte(strings.Join(fields, "|")))
	return h.Sum(nil)
}
