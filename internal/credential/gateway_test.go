package credential

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"strings"
	"testing"
	"time"
)

// The golden vectors were made with the gateway's own code.
const (
	goldenKey      = "Gq7Tz9mKfleet"
	goldenSecret   = "Te1st12134"
	goldenClientID = "GID_lichuang-dev@@@aa_bb_cc_dd_ee_ff@@@36c98363-3656-43cb-a00f-8bced2391a90"
	goldenUsername = "eyJpcCI6IjIyMi4yMjIuMjIyLjIyMiJ9" // {"ip":"222.222.222.222"}
	goldenPassword = "4mZePrI2DkxNhNnHRl/WS8KKzrFqXMvj0c3a/OGeMas="
	goldenMAC      = "aa:bb:cc:dd:ee:ff"
	goldenUUID     = "36c98363-3656-43cb-a00f-8bced2391a90"
	goldenDaily    = "c6f97c8ba1c4dcf4183c83d3c248b68366fdfd5fe8e2bf50c670305572f049dd" // of 2026-08-08
	goldenUpstream = "syQ4C037HBT7oiD1DGUGV36J6wFRooVF4uFF3wIz7QE.1754640000"
)

func gateway(t testing.TB) *Gateway {
	t.Helper()
	g, err := NewGateway(goldenKey)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func TestGatewayGoldenVectors(t *testing.T) {
	g := gateway(t)
	if got := g.Password(goldenClientID, goldenUsername); got != goldenPassword {
		t.Errorf("password %s, want %s", got, goldenPassword)
	}
	if mac, uuid, ok := g.Verify(goldenClientID, goldenUsername, goldenPassword); !ok || mac != goldenMAC || uuid != goldenUUID {
		t.Errorf("verify: %q %q %t", mac, uuid, ok)
	}
	day := time.Date(2026, 8, 8, 23, 59, 59, 0, time.FixedZone("+08", 8*3600))
	if got := g.DailyToken(day); got != goldenDaily {
		t.Errorf("daily token %s, want %s", got, goldenDaily)
	}
	if got := UpstreamToken(goldenSecret, goldenUUID, goldenMAC, time.Unix(1754640000, 999)); got != goldenUpstream {
		t.Errorf("upstream token %s, want %s", got, goldenUpstream)
	}
	if got := UpstreamToken("", goldenUUID, goldenMAC, time.Unix(1754640000, 0)); got != "test-token" {
		t.Errorf("upstream token without a secret: %s", got)
	}
}

func TestGatewayVerifyRefuses(t *testing.T) {
	g := gateway(t)
	for name, c := range map[string]struct{ clientID, username, password string }{
		"no password":       {goldenClientID, goldenUsername, ""},
		"cut password":      {goldenClientID, goldenUsername, goldenPassword[:43]},
		"other password":    {goldenClientID, goldenUsername, strings.Replace(goldenPassword, "4", "5", 1)},
		"other username":    {goldenClientID, "e30=", goldenPassword},
		"other device":      {strings.Replace(goldenClientID, "aa_", "ab_", 1), goldenUsername, goldenPassword},
		"other group":       {"x" + goldenClientID, goldenUsername, goldenPassword},
		"two parts":         signed(g, "GID_x@@@aa_bb_cc_dd_ee_ff", goldenUsername),
		"four parts":        signed(g, goldenClientID+"@@@x", goldenUsername),
		"one part":          signed(g, "aa_bb_cc_dd_ee_ff", goldenUsername),
		"colons":            signed(g, "GID_x@@@aa:bb:cc:dd:ee:ff@@@u", goldenUsername),
		"no separators":     signed(g, "GID_x@@@aabbccddeeff@@@u", goldenUsername),
		"short MAC":         signed(g, "GID_x@@@aa_bb_cc_dd_ee_f@@@u", goldenUsername),
		"no hex":            signed(g, "GID_x@@@aa_bb_cc_dd_ee_fg@@@u", goldenUsername),
		"no MAC":            signed(g, "GID_x@@@unknown@@@u", goldenUsername),
		"no username":       signed(g, goldenClientID, ""),
		"separator shifted": {goldenClientID + "|" + goldenUsername, "", goldenPassword},
		"a bar in the id":   signed(g, goldenClientID+"|x", goldenUsername),
		"mixed separators":  signed(g, "GID_x@@@aa_bb_cc_dd-ee_ff_@@@u", goldenUsername),
		"endless id":        signed(g, goldenClientID+strings.Repeat("x", maxGatewayID), goldenUsername),
	} {
		if mac, uuid, ok := g.Verify(c.clientID, c.username, c.password); ok || mac != "" || uuid != "" {
			t.Errorf("%s passes as %q %q", name, mac, uuid)
		}
	}
	other, err := NewGateway(goldenKey + "2")
	if err != nil {
		t.Fatal(err)
	}
	if _, _, ok := other.Verify(goldenClientID, goldenUsername, goldenPassword); ok {
		t.Error("the password passes under another key")
	}
}

// signed is a CONNECT with the right password, whatever its id is.
func signed(g *Gateway, clientID, username string) struct{ clientID, username, password string } {
	return struct{ clientID, username, password string }{clientID, username, g.Password(clientID, username)}
}

func TestGatewayVerifyAccepts(t *testing.T) {
	g := gateway(t)
	for _, c := range []struct{ clientID, mac, uuid string }{
		{"GID_default@@@11_22_33_44_55_66@@@11_22_33_44_55_66", "11:22:33:44:55:66", "11_22_33_44_55_66"}, // as the console makes them
		{"GID_x@@@AA_BB_CC_DD_EE_FF@@@u", goldenMAC, "u"},
		{"@@@aa_bb_cc_dd_ee_ff@@@", goldenMAC, ""},
	} {
		if mac, uuid, ok := g.Verify(c.clientID, goldenUsername, g.Password(c.clientID, goldenUsername)); !ok || mac != c.mac || uuid != c.uuid {
			t.Errorf("%s: %q %q %t", c.clientID, mac, uuid, ok)
		}
	}
}

func TestParseGatewayID(t *testing.T) {
	for _, c := range []struct {
		id, mac, uuid string
		gateway       bool
	}{
		{goldenClientID, goldenMAC, goldenUUID, true},
		{"GID_x@@@aa_bb_cc_dd_ee_ff", goldenMAC, "", true},
		{"lichuang-dev@@@A0_85_E3_F4_49_34@@@u", "a0:85:e3:f4:49:34", "u", true},
		{"g@@@aa:bb:cc:dd:ee:ff@@@u", goldenMAC, "u", true},
		{"g@@@aa-bb-cc-dd-ee-ff@@@u", goldenMAC, "u", true},
		{"g@@@aabbccddeeff@@@u", goldenMAC, "u", true},
		{"g@@@aa_bb:cc_dd_ee_ff@@@u", "", "", true},
		{"g@@@aa_bb_cc_dd_ee_gg@@@u", "", "", true},
		{"g@@@aa__bbccddeeff___@@@u", "", "", true},
		{"g@@@unknown@@@u", "", "", true},
		{"g@@@@@@u", "", "", true},
		{"@@@", "", "", true},
		{"a@@@aabbccddeeff@@@b@@@c", "", "", true},
		{"aa:bb:cc:dd:ee:ff", "", "", false},
		{"g@@aabbccddeeff@@u", "", "", false},
		{"", "", "", false},
	} {
		mac, uuid, ok := ParseGatewayID(c.id)
		if mac != c.mac || uuid != c.uuid || ok != (c.mac != "") || IsGatewayID(c.id) != c.gateway {
			t.Errorf("%q: %q %q %t, gateway's %t", c.id, mac, uuid, ok, IsGatewayID(c.id))
		}
	}
}

func TestGatewayDailyToken(t *testing.T) {
	g := gateway(t)
	now := time.Date(2026, 3, 1, 0, 30, 0, 0, time.UTC)
	for _, c := range []struct {
		date string
		ok   bool
	}{{"2026-02-27", false}, {"2026-02-28", true}, {"2026-03-01", true}, {"2026-03-02", true}, {"2026-03-03", false}, {"", false}} {
		sum := sha256.Sum256([]byte(c.date + goldenKey))
		token := hex.EncodeToString(sum[:])
		if g.IsDaily(token, now) != c.ok {
			t.Errorf("token of %q: %t, want %t", c.date, !c.ok, c.ok)
		}
		if g.IsDaily(strings.ToUpper(token), now) {
			t.Errorf("token of %q passes in upper case", c.date)
		}
	}
	// Whatever the gateway's own zone is, the token of its date passes.
	for hours := -12; hours <= 14; hours++ {
		zone := time.FixedZone("", hours*3600)
		for _, hour := range []int{0, 11, 23} {
			at := time.Date(2026, 3, 1, hour, 59, 0, 0, time.UTC)
			if !g.IsDaily(g.DailyToken(at.In(zone)), at) {
				t.Errorf("token of the date in zone %+d at %v is refused", hours, at)
			}
		}
	}
	for _, bad := range []string{"", "x", goldenDaily} {
		if g.IsDaily(bad, now) {
			t.Errorf("%q passes", bad)
		}
	}
}

func TestGatewaySignatureKeyRules(t *testing.T) {
	for _, c := range []struct {
		key  string
		want error
	}{
		{goldenKey, nil}, {"abcdEFGH", nil}, {"ключКЛЮЧaB", nil},
		{"", ErrSignatureKeyShort}, {"Gq7Tz9m", ErrSignatureKeyShort}, {"éÉéÉéÉa", ErrSignatureKeyShort},
		{"abcdefgh", ErrSignatureKeyCase}, {"ABCDEFGH", ErrSignatureKeyCase}, {"87654321", ErrSignatureKeyCase}, {"abcdefgÉ", ErrSignatureKeyCase},
		{"myTESTkeyAbc", ErrSignatureKeyWeak}, {"Abcdef1234", ErrSignatureKeyWeak}, {"AdMinistrator", ErrSignatureKeyWeak},
		{"MyPassword", ErrSignatureKeyWeak}, {"Qwertyuiop", ErrSignatureKeyWeak}, {"XiaoZhi-Key", ErrSignatureKeyWeak},
	} {
		g, err := NewGateway(c.key)
		if !errors.Is(err, c.want) || (g == nil) != (c.want != nil) {
			t.Errorf("key %q: %v, want %v", c.key, err, c.want)
		}
		if err != nil && (c.key != "" && strings.Contains(err.Error(), c.key) || !strings.Contains(err.Error(), "choose another one")) {
			t.Errorf("key %q: the error repeats it or does not say what to do: %v", c.key, err)
		}
	}
}

func FuzzGateway(f *testing.F) {
	g := gateway(f)
	f.Add(goldenClientID, goldenUsername, goldenPassword)
	f.Add("a@@@aabbccddeeff", "", "")
	f.Fuzz(func(t *testing.T, clientID, username, password string) {
		mac, uuid, ok := g.Verify(clientID, username, password)
		if !ok {
			return
		}
		if password != g.Password(clientID, username) {
			t.Errorf("%q %q passes with %q", clientID, username, password)
		}
		if again, sameUUID, parsed := ParseGatewayID(clientID); !parsed || again != mac || sameUUID != uuid {
			t.Errorf("%q is %s when verified, %s when parsed", clientID, mac, again)
		}
	})
}
