package firmware

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

// errAnswer marks an OTA answer that counts as a failed check and is tried again.
var errAnswer = errors.New("OTA check failed")

// otaAnswer is what Ota::CheckVersion leaves (main/ota.cc:79-245).
type otaAnswer struct {
	code         string
	challenge    string
	hasCode      bool
	hasChallenge bool
	mqtt         bool
	websocket    bool
	upgrade      bool
	firmwareURL  string
	// clock is the device's new wall clock in ms since the epoch, time zone included; 0 when not given.
	clock float64
}

// otaIdentity is what goes into the headers of the check and of the activation.
type otaIdentity struct {
	serial   string
	deviceID string
	clientID string
	agent    string
	language string
}

// headers are in the order of the client's std::map, whose keys are lower-cased.
func (i otaIdentity) headers() []header {
	h := make([]header, 0, 8)
	version := "1"
	if i.serial != "" {
		version = "2"
	}
	h = append(h, header{"Accept-Language", i.language}, header{"Activation-Version", version},
		header{"Client-Id", i.clientID}, header{"Content-Type", "application/json"}, header{"Device-Id", i.deviceID})
	if i.serial != "" {
		h = append(h, header{"Serial-Number", i.serial})
	}
	return append(h, header{"User-Agent", i.agent})
}

// fetchOTA performs one check and returns the answer's body.
func fetchOTA(ctx context.Context, d *dialer, index int, url string, who otaIdentity, body string) ([]byte, error) {
	if len(url) < 10 {
		return nil, fmt.Errorf("%w: OTA URL %q is shorter than 10 characters", errAnswer, url)
	}
	call, err := openHTTP(ctx, d, index, "POST", url, who.headers(), []byte(body))
	if err != nil {
		return nil, err
	}
	defer func() { _ = call.close() }()
	status, err := call.status()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errAnswer, err)
	}
	if status != 200 {
		return nil, fmt.Errorf("%w: status %d", errAnswer, status)
	}
	data, err := call.body()
	if errors.Is(err, errHang) {
		return nil, err
	}
	if err != nil || len(data) == 0 {
		return nil, fmt.Errorf("%w: no body: %w", errAnswer, err)
	}
	return data, nil
}

// readOTA applies an answer to the settings, in the firmware's order. Errors of errNVS and errStoi abort the device.
func readOTA(body []byte, settings *nvs, current string) (otaAnswer, error) {
	var doc jsonDoc
	root, err := doc.parse(body)
	if err != nil {
		return otaAnswer{}, fmt.Errorf("%w: %w", errAnswer, err)
	}
	var a otaAnswer
	if act := root.get("activation"); act.is(jsonObject) {
		code, challenge := act.get("code"), act.get("challenge")
		a.code, a.hasCode = code.string(), code.is(jsonString)
		a.challenge, a.hasChallenge = challenge.string(), challenge.is(jsonString)
	}
	if section := root.get("mqtt"); section.is(jsonObject) {
		a.mqtt = true
		if err := settings.store("mqtt", section); err != nil {
			return a, err
		}
	}
	if section := root.get("websocket"); section.is(jsonObject) {
		a.websocket = true
		if err := settings.store("websocket", section); err != nil {
			return a, err
		}
	}
	if st := root.get("server_time"); st.is(jsonObject) && st.get("timestamp").is(jsonNumber) {
		// The chip's clock runs in local time: the offset is added and forgotten.
		a.clock = st.get("timestamp").number() + float64(st.get("timezone_offset").int32())*60_000
	}
	fw := root.get("firmware")
	if version, url := fw.get("version"), fw.get("url"); fw.is(jsonObject) && version.is(jsonString) && url.is(jsonString) {
		a.firmwareURL = url.string()
		if a.upgrade, err = newerVersion(current, version.string()); err != nil {
			return a, err
		}
		if force := fw.get("force"); force.is(jsonNumber) && force.int32() == 1 {
			a.upgrade = true
		}
	}
	return a, nil
}

// activationBody is Ota::GetActivationPayload (main/ota.cc:421-450).
func activationBody(serial string, key [32]byte, challenge string) string {
	if serial == "" {
		return "{}"
	}
	mac := hmac.New(sha256.New, key[:])
	mac.Write([]byte(challenge))
	b := []byte(`{"algorithm":"hmac-sha256","serial_number":`)
	b = appendJSONString(b, serial)
	b = appendJSONString(append(b, `,"challenge":`...), challenge)
	b = append(append(b, `,"hmac":"`...), hex.EncodeToString(mac.Sum(nil))...)
	return string(append(b, `"}`...))
}

// postActivation sends one activation request and returns the status.
func postActivation(ctx context.Context, d *dialer, index int, otaURL string, who otaIdentity, body string) (int, error) {
	url := otaURL
	if !strings.HasSuffix(url, "/") {
		url += "/"
	}
	call, err := openHTTP(ctx, d, index, "POST", url+"activate", who.headers(), []byte(body))
	if err != nil {
		return 0, err
	}
	defer func() { _ = call.close() }()
	return call.status()
}
