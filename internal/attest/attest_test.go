package attest

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

const (
	serial = "SN0123456789ABCDEF0123456789ABCD"
	robot  = devices.ID("aa:bb:cc:dd:ee:01")
	other  = devices.ID("aa:bb:cc:dd:ee:02")
)

var keyOne, keyTwo = strings.Repeat("01", KeySize), strings.Repeat("02", KeySize)

// camp is a core with a list of chips.
type camp struct {
	*devicetest.Ports
	service *fleet.Service
	list    *List
}

func newCamp(t testing.TB, chips ...devices.Chip) *camp {
	t.Helper()
	c := &camp{Ports: devicetest.New()}
	c.service = c.Service(t, fleet.Config{Approve: true})
	c.list = newList(t, c.Ports, "a secret for tests only")
	if len(chips) > 0 {
		if err := c.list.Import(t.Context(), chips); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

func newList(t testing.TB, keys Keys, secret string) *List {
	t.Helper()
	mint, err := credential.New([]byte(secret))
	if err != nil {
		t.Fatal(err)
	}
	return New(keys, mint, slog.New(slog.DiscardHandler))
}

// checkIn is the device's OTA check; it returns the challenge.
func (c *camp) checkIn(t testing.TB, id devices.ID, client string) string {
	t.Helper()
	w, err := c.service.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: client, Facts: devices.Facts{Serial: serial, ActivateV2: true}})
	if err != nil {
		t.Fatal(err)
	}
	return w.Challenge
}

func signed(serial, key, challenge string) string {
	secret, _ := hex.DecodeString(key) // of this test
	h := hmac.New(sha256.New, secret)
	h.Write([]byte(challenge))
	return fmt.Sprintf(`{"algorithm":"hmac-sha256","serial_number":%q,"challenge":%q,"hmac":"%x"}`, serial, challenge, h.Sum(nil))
}

func (c *camp) prove(t testing.TB, id devices.ID, client, body string) string {
	t.Helper()
	return c.list.Prove(t.Context(), c.service, id, client, strings.NewReader(body))
}

func (c *camp) want(t testing.TB, what, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %s, want %s", what, got, want)
	}
}

// The signature of the golden vector is judged as the firmware makes it.
func TestVector(t *testing.T) {
	var v struct {
		Key  string `json:"efuse_key0_hex"`
		Body string `json:"request_body"`
	}
	data, err := os.ReadFile(filepath.Join("..", "..", "testdata", "vectors", "activation_v2.json"))
	if err == nil {
		err = json.Unmarshal(data, &v)
	}
	if err != nil {
		t.Fatal(err)
	}
	key, err := hex.DecodeString(v.Key)
	if err != nil {
		t.Fatal(err)
	}
	p, outcome := parse(strings.NewReader(v.Body))
	if outcome != "" || !isSigned(key, p) {
		t.Errorf("%+v, %s", p, outcome)
	}
	key[0] ^= 1
	// security: D4
	if isSigned(key, p) {
		t.Error("another key has the same signature")
	}
}

// A right proof admits the device and binds its serial number; it works once.
func TestProofAdmits(t *testing.T) {
	c := newCamp(t, devices.Chip{Serial: serial, Key: keyOne})
	body := signed(serial, keyOne, c.checkIn(t, robot, "c1"))
	c.want(t, "proof", c.prove(t, robot, "c1", body), OutcomeAdmitted)
	if !c.service.IsActivated(robot, "c1") || c.Chips[serial].Device != robot {
		t.Errorf("not admitted, or bound to %q", c.Chips[serial].Device)
	}
	c.want(t, "the same once more", c.prove(t, robot, "c1", body), OutcomeStale)
	if w, err := c.service.CheckIn(t.Context(), admission.CheckIn{Device: robot, ClientID: "c1"}); err != nil || !w.Admitted || w.Generation != 0 {
		t.Errorf("%+v, %v", w, err)
	}
}

// An erased flash brings another Client-Id: the hardware proves that it is the
// same device, and the credentials of the old one die.
func TestProofReplacesClient(t *testing.T) {
	c := newCamp(t, devices.Chip{Serial: serial, Key: keyOne, Device: string(robot)})
	c.want(t, "first", c.prove(t, robot, "c1", signed(serial, keyOne, c.checkIn(t, robot, "c1"))), OutcomeAdmitted)
	c.want(t, "after erasing", c.prove(t, robot, "c2", signed(serial, keyOne, c.checkIn(t, robot, "c2"))), OutcomeAdmitted)
	if generation, ok := c.service.Generation(robot); !ok || generation != 1 || c.service.IsActivated(robot, "c1") {
		t.Errorf("generation %d, %v", generation, ok)
	}
}

// A request without a proof leaves the device pending, like one without a serial number.
func TestNoProof(t *testing.T) {
	c := newCamp(t, devices.Chip{Serial: serial, Key: keyOne})
	challenge := c.checkIn(t, robot, "c1")
	good := signed(serial, keyOne, challenge)
	for _, tc := range []struct{ name, body, want string }{
		{"no serial number", "{}", OutcomeNone},
		{"nothing", "", OutcomeNone},
		{"chip without the unit", `{"algorithm":"hmac-sha256","serial_number":"` + serial + `","challenge":"` + challenge + `","hmac":""}`, OutcomeNone},
		{"no JSON", good[1:], OutcomeMalformed},
		{"other types", `{"hmac":1}`, OutcomeMalformed},
		{"an array", `[` + good + `]`, OutcomeMalformed},
		{"deep", strings.Repeat("[", 4000), OutcomeMalformed},
		{"huge", strings.Replace(good, "{", `{"x":"`+strings.Repeat("x", MaxBody)+`",`, 1), OutcomeMalformed},
		{"short signature", strings.Replace(good, `"hmac":"`, `"hmac":"ab","x":"`, 1), OutcomeMalformed},
		{"serial number that is none", signed("a b", keyOne, challenge), OutcomeMalformed},
		{"other algorithm", strings.Replace(good, "hmac-sha256", "none", 1), OutcomeAlgorithm},
		{"other challenge", signed(serial, keyOne, "0123"), OutcomeStale},
		{"no challenge", signed(serial, keyOne, ""), OutcomeStale},
		{"serial number not listed", signed("SN-2", keyOne, challenge), OutcomeUnlisted},
		{"the same again, from memory", signed("SN-2", keyOne, challenge), OutcomeUnlisted},
	} {
		c.want(t, tc.name, c.prove(t, robot, "c1", tc.body), tc.want)
	}
	c.want(t, "another client's challenge", c.prove(t, robot, "c2", good), OutcomeStale)
	c.want(t, "another device's challenge", c.prove(t, other, "c1", good), OutcomeStale)
	c.want(t, "after all of that", c.prove(t, robot, "c1", good), OutcomeAdmitted)
	if n := len(c.Seen(devices.EventContested)); n != 0 {
		t.Errorf("%d contested events", n)
	}
}

// A wrong signature for a listed number is reported, costs its challenge, and
// never admits; the right chip can still sign at its next check.
func TestWrongSignature(t *testing.T) {
	c := newCamp(t, devices.Chip{Serial: serial, Key: keyOne})
	challenge := c.checkIn(t, robot, "c1")
	// security: D4
	c.want(t, "wrong", c.prove(t, robot, "c1", signed(serial, keyTwo, challenge)), OutcomeWrong)
	// security: D4
	c.want(t, "right, to the used challenge", c.prove(t, robot, "c1", signed(serial, keyOne, challenge)), OutcomeStale)
	c.contested(t, robot, devices.DisputeProof)
	again := c.checkIn(t, robot, "c1")
	if again == challenge {
		t.Fatal("the challenge was given out twice")
	}
	c.want(t, "right, to the new challenge", c.prove(t, robot, "c1", signed(serial, keyOne, again)), OutcomeAdmitted)
}

// contested expects the event, the state and the counter.
func (c *camp) contested(t testing.TB, id devices.ID, reason devices.Dispute) {
	t.Helper()
	seen := c.Seen(devices.EventContested)
	if len(seen) == 0 || seen[len(seen)-1].Device != id || !strings.Contains(string(seen[len(seen)-1].Fields), `"reason":"`+string(reason)+`"`) {
		t.Errorf("events %+v", seen)
	}
	if v, err := c.service.Get(t.Context(), id); err != nil || v.State != devices.StateContested || c.service.Stats().Contested.Get(reason) == 0 || c.service.Contested() == 0 {
		t.Errorf("%s is %s, %v", id, v.State, err)
	}
}

// A serial number proves one device, and a device is proven by one number.
func TestOneToOne(t *testing.T) {
	c := newCamp(t, devices.Chip{Serial: serial, Key: keyOne}, devices.Chip{Serial: "SN-2", Key: keyTwo})
	c.want(t, "first", c.prove(t, robot, "c1", signed(serial, keyOne, c.checkIn(t, robot, "c1"))), OutcomeAdmitted)
	// security: D4
	c.want(t, "a second device with the number", c.prove(t, other, "c2", signed(serial, keyOne, c.checkIn(t, other, "c2"))), OutcomeContested)
	c.contested(t, other, devices.DisputeSerial)
	// security: D4
	if c.service.IsActivated(other, "c2") {
		t.Error("admitted")
	}
	// security: D4
	c.want(t, "a second number for the device", c.prove(t, robot, "c3", signed("SN-2", keyTwo, c.checkIn(t, robot, "c3"))), OutcomeContested)
	c.contested(t, robot, devices.DisputeDevice)
	if c.Chips["SN-2"].Device != "" || !c.service.IsActivated(robot, "c1") {
		t.Error("bound, or the member was replaced")
	}
	// Also where nobody is a member under the name.
	if err := c.service.Forget(t.Context(), devicetest.Admin, robot); err != nil {
		t.Fatal(err)
	}
	// security: D4
	c.want(t, "a forgotten device with another number", c.prove(t, robot, "c3", signed("SN-2", keyTwo, c.checkIn(t, robot, "c3"))), OutcomeContested)
	c.contested(t, robot, devices.DisputeDevice)
	c.want(t, "with its own", c.prove(t, robot, "c4", signed(serial, keyOne, c.checkIn(t, robot, "c4"))), OutcomeAdmitted)
}

// A listed chip cannot take over a member that never reported it: its number is not
// even bound. The member's own, as it named it while it was let in, is.
func TestForeignChip(t *testing.T) {
	c := newCamp(t, devices.Chip{Serial: serial, Key: keyOne}, devices.Chip{Serial: "SN-2", Key: keyTwo})
	c.checkIn(t, robot, "c1")
	if _, err := c.service.Approve(t.Context(), devicetest.Admin, string(robot), ""); err != nil {
		t.Fatal(err)
	}
	c.checkIn(t, robot, "c1") // it names its serial number
	// security: D4
	c.want(t, "another chip", c.prove(t, robot, "c2", signed("SN-2", keyTwo, c.checkIn(t, robot, "c2"))), admission.RefusedForeign)
	// security: D4
	if c.Chips["SN-2"].Device != "" || !c.service.IsActivated(robot, "c1") {
		t.Error("bound, or the member was replaced")
	}
	c.want(t, "its own chip", c.prove(t, robot, "c2", signed(serial, keyOne, c.checkIn(t, robot, "c2"))), OutcomeAdmitted)
	if !c.service.IsActivated(robot, "c2") || c.Chips[serial].Device != robot {
		t.Error("not admitted, or not bound")
	}
}

// What an operator revoked stays out until an operator approves it.
func TestRevokedStaysOut(t *testing.T) {
	c := newCamp(t, devices.Chip{Serial: serial, Key: keyOne})
	c.want(t, "first", c.prove(t, robot, "c1", signed(serial, keyOne, c.checkIn(t, robot, "c1"))), OutcomeAdmitted)
	if _, err := c.service.Revoke(t.Context(), devicetest.Admin, robot); err != nil {
		t.Fatal(err)
	}
	// security: D5
	c.want(t, "revoked", c.prove(t, robot, "c1", signed(serial, keyOne, c.checkIn(t, robot, "c1"))), admission.RefusedRevoked)
	// security: D5
	if _, ok := c.service.Generation(robot); ok {
		t.Error("its credentials are valid")
	}
}

// Without the database, or with keys of another secret, nobody is admitted on a
// guess, and the challenge stays good.
func TestNotJudged(t *testing.T) {
	c := newCamp(t, devices.Chip{Serial: serial, Key: keyOne})
	body := signed(serial, keyOne, c.checkIn(t, robot, "c1"))
	c.SetAway(true)
	// security: D5
	c.want(t, "no database", c.prove(t, robot, "c1", body), OutcomeUnavailable)
	c.SetAway(false)
	mine := c.list
	c.list = newList(t, c.Ports, "another secret, for tests")
	// security: D5
	c.want(t, "another secret", c.prove(t, robot, "c1", body), OutcomeUnreadable)
	c.list = mine
	k := c.Chips[serial]
	c.Chips["SN-2"] = devices.AttestationKey{Serial: "SN-2", Sealed: k.Sealed}
	// security: D5
	c.want(t, "a key copied to another number", c.prove(t, robot, "c1", signed("SN-2", keyOne, c.checkIn(t, robot, "c1"))), OutcomeUnreadable)
	for range MaxLookups {
		mine.slots <- struct{}{}
	}
	// security: D5
	c.want(t, "too many at once", c.prove(t, robot, "c1", body), OutcomeBusy)
	for range MaxLookups {
		<-mine.slots
	}
	c.want(t, "afterwards", c.prove(t, robot, "c1", body), OutcomeAdmitted)
}

// Of many answers to one challenge one counts.
func TestOneUse(t *testing.T) {
	c := newCamp(t, devices.Chip{Serial: serial, Key: keyOne})
	body := signed(serial, keyOne, c.checkIn(t, robot, "c1"))
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() { c.prove(t, robot, "c1", body) })
	}
	wg.Wait()
	// security: D4
	if admitted := c.list.Proofs.Get(OutcomeAdmitted); admitted != 1 {
		t.Errorf("%d proofs admitted", admitted)
	}
}

func TestImport(t *testing.T) {
	c := newCamp(t, devices.Chip{Serial: serial, Key: keyOne, Device: "AABBCCDDEE01"})
	// security: D6
	if k := c.Chips[serial]; k.Device != robot || strings.Contains(k.Sealed, keyOne) || len(k.Sealed) < 2*KeySize {
		t.Errorf("%+v", k)
	}
	for name, chips := range map[string][]devices.Chip{
		"nothing":          nil,
		"too many":         make([]devices.Chip, MaxImport+1),
		"no number":        {{Key: keyOne}},
		"bad number":       {{Serial: "a/b", Key: keyOne}},
		"short key":        {{Serial: "a", Key: "01"}},
		"no hex":           {{Serial: "a", Key: strings.Repeat("x", 64)}},
		"bad device":       {{Serial: "a", Key: keyOne, Device: "a b"}},
		"a number twice":   {{Serial: "a", Key: keyOne}, {Serial: "a", Key: keyTwo}},
		"a device twice":   {{Serial: "a", Key: keyOne, Device: "d"}, {Serial: "b", Key: keyTwo, Device: "d"}},
		"a device already": {{Serial: "b", Key: keyTwo}, {Serial: "a", Key: keyOne, Device: string(robot)}},
	} {
		err := c.list.Import(t.Context(), chips)
		if devices.AsError(err).Code != devices.CodeBadRequest || strings.Contains(err.Error(), keyOne) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if len(c.Chips) != 1 {
		t.Errorf("%d keys are listed", len(c.Chips))
	}
	if err := c.list.Import(t.Context(), []devices.Chip{{Serial: serial, Key: keyTwo}}); err != nil || c.Chips[serial].Device != robot {
		t.Errorf("a new key: %v, %+v", err, c.Chips[serial])
	}
	listed, more, err := c.list.List(t.Context(), "", 1)
	// security: D6
	if err != nil || more || len(listed) != 1 || listed[0].Sealed != "" {
		t.Errorf("%+v, %v, %v", listed, more, err)
	}
	if err := c.list.Remove(t.Context(), serial); err != nil {
		t.Error(err)
	}
	if err := c.list.Remove(t.Context(), serial); !errors.Is(err, &devices.Error{Code: devices.CodeNotFound}) {
		t.Error(err)
	}
}

func FuzzProof(f *testing.F) {
	f.Add(signed(serial, keyOne, "c"))
	f.Add("{}")
	f.Fuzz(func(t *testing.T, body string) {
		p, outcome := parse(strings.NewReader(body))
		if outcome == "" && (checkSerial(p.Serial) != nil || len(p.HMAC) != 64 || len(body) > MaxBody) {
			t.Errorf("%q passes", body)
		}
	})
}
