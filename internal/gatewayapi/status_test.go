package gatewayapi

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

const statusPath = "/api/devices/status"

func TestStatusGolden(t *testing.T) {
	f := newFleet(t).listen(t)
	l := f.connect(t, robot, devicetest.NewScript())
	const nobody = `:{"isAlive":false,"exists":false}`
	for _, c := range []struct {
		name, path, body string
		want             string
	}{
		{"idle, unknown, nonsense, twice", statusPath, `{"clientIds":["` + robotClient + `","GID_x@@@11_22_33_44_55_66@@@u","a\"b","` + robotClient + `"]}`,
			`{"` + robotClient + `":{"isAlive":null,"exists":true},"GID_x@@@11_22_33_44_55_66@@@u"` + nobody + `,"a\"b"` + nobody + `}`},
		{"idle, strict", statusPath + "?strict=1", `{"clientIds":["` + robotClient + `"]}`, `{"` + robotClient + `":{"isAlive":false,"exists":true}}`},
		{"strict is 1 alone", statusPath + "?strict=0", `{"clientIds":["` + robotClient + `"]}`, `{"` + robotClient + `":{"isAlive":null,"exists":true}}`},
		{"none", statusPath, `{"clientIds":[]}`, `{}`},
		{"other types", statusPath, `{"clientIds":[5,null,true,{},[],""]}`, `{"5"` + nobody + `,"null"` + nobody + `,"true"` + nobody + `,"{}"` + nobody + `,"[]"` + nobody + `,""` + nobody + `}`},
		{"deviceIds", statusPath, `{"deviceIds":["x@@@AA_BB_CC_DD_EE_FF"]}`, `{"x@@@AA_BB_CC_DD_EE_FF":{"isAlive":null,"exists":true}}`},
		{"both", statusPath, `{"deviceIds":["x"],"clientIds":[]}`, `{}`},
		{"null and deviceIds", statusPath, `{"deviceIds":[],"clientIds":null}`, `{}`},
		{"slash at the end", statusPath + "/", `{"clientIds":[]}`, `{}`},
	} {
		t.Run(c.name, func(t *testing.T) { f.do(t, "POST", c.path, c.body).is(t, 200, CodeOK, c.want) })
	}
	talk(t, l)
	f.do(t, "POST", statusPath, `{"clientIds":["`+robotClient+`"]}`).is(t, 200, CodeOK, `{"`+robotClient+`":{"isAlive":true,"exists":true}}`)
	l.Session.Close(devices.CloseGone)
	f.do(t, "POST", statusPath, `{"clientIds":["`+robotClient+`"]}`).is(t, 200, CodeOK, `{"`+robotClient+`"`+nobody+`}`)
}

func TestStatusRefuses(t *testing.T) {
	f := newFleet(t).listen(t)
	for _, body := range []string{``, `{}`, `[]`, `{"clientIds":"x"}`, `{"clientIds":{}}`, `{"clientIds":false,"deviceIds":[]}`, `{"deviceIds":5}`} {
		for _, query := range []string{"", "?strict=1"} {
			f.do(t, "POST", statusPath+query, body).is(t, 400, devices.CodeBadRequest, `{"error":"clientIds必须是一个数组"}`)
		}
	}
	f.do(t, "POST", statusPath, `{"clientIds":[`).is(t, 400, devices.CodeBadRequest, `{"error":"the body is not usable: not valid JSON"}`)
	f.do(t, "POST", statusPath, `"x"`).is(t, 400, devices.CodeBadRequest, `{"error":"the body is not usable: it must be a JSON object"}`)
	f.do(t, "POST", statusPath, strings.Repeat(" ", BodyLimit+1)).is(t, 413, devices.CodeTooLarge, `{"error":"a request body may have 102400 bytes"}`)
}

// TestStatusWithoutDatabase: connected devices are known from memory, and the
// rest does not hold the answer up.
func TestStatusWithoutDatabase(t *testing.T) {
	f := newFleet(t).listen(t)
	f.connect(t, robot, devicetest.NewScript())
	f.ports.SetAway(true)
	f.do(t, "POST", statusPath, `{"clientIds":["x@@@11_22_33_44_55_66","`+robotClient+`"]}`).is(t, 200, CodeOK,
		`{"x@@@11_22_33_44_55_66":{"isAlive":false,"exists":false},"`+robotClient+`":{"isAlive":null,"exists":true}}`)
}

// slow is a core whose database never answers.
type slow struct{ Service }

func (s slow) Get(ctx context.Context, id devices.ID) (devices.View, error) {
	if id == robot {
		return s.Service.Get(ctx, id)
	}
	<-ctx.Done()
	return devices.View{}, ctx.Err()
}

func TestStatusEndsInTime(t *testing.T) {
	f := newFleet(t, func(o *Options) { o.Service, o.Timeout = slow{o.Service}, 20*time.Millisecond }).listen(t)
	f.connect(t, robot, devicetest.NewScript())
	var ids []string
	for i := range 1000 {
		ids = append(ids, fmt.Sprintf(`"g@@@11_22_33_44_%02x_%02x"`, i>>8, i&255))
	}
	r := f.do(t, "POST", statusPath, `{"clientIds":[`+strings.Join(ids, ",")+`,"`+robotClient+`"]}`)
	if r.status != 200 || !strings.HasSuffix(r.body, `"`+robotClient+`":{"isAlive":null,"exists":true}}`) || strings.Count(r.body, `"exists"`) != 1001 {
		t.Errorf("%d %s", r.status, r.body)
	}
}

func TestTokens(t *testing.T) {
	f := newFleet(t).listen(t)
	today := f.gateway.DailyToken(time.Now().UTC())
	const missing, wrong = `{"error":"未提供有效的Authorization头"}`, `{"error":"无效的授权令牌"}`
	for _, c := range []struct{ name, header, want string }{
		{"none", "", missing},
		{"basic", "Basic " + today, missing},
		{"lower case", "bearer " + today, missing},
		{"token alone", today, missing},
		{"wrong", "Bearer x", wrong},
		{"two blanks", "Bearer  " + today, wrong},
		{"upper-case token", "Bearer " + strings.ToUpper(today), wrong},
		{"old", "Bearer " + f.gateway.DailyToken(time.Now().UTC().AddDate(0, 0, -2)), wrong},
		{"another fleet's admin", "Bearer " + strings.Repeat("0", 64), wrong},
		{"today", "Bearer " + today, ""},
		{"yesterday", "Bearer " + f.gateway.DailyToken(time.Now().UTC().AddDate(0, 0, -1)), ""},
		{"tomorrow", "Bearer " + f.gateway.DailyToken(time.Now().UTC().AddDate(0, 0, 1)), ""},
		{"more text after it", "Bearer " + today + " extra", ""},
		{"admin", "Bearer " + f.mint.AdminToken(), ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			for path, body := range map[string]string{statusPath: `{"clientIds":[]}`, commandRobot: `{`, "/api/call/request": `{}`} {
				r := f.do(t, "POST", path, body, "Authorization", c.header)
				if c.want != "" {
					r.is(t, 401, devices.CodeUnauthorized, c.want)
				} else if r.status == 401 {
					t.Errorf("%s: %s", path, r.body)
				}
			}
		})
	}
	if log := f.log.String(); strings.Contains(log, today) || strings.Contains(log, f.mint.AdminToken()) || !strings.Contains(log, `caller="admin token"`) {
		t.Errorf("log:\n%s", log)
	}
}

func TestOtherRoutes(t *testing.T) {
	f := newFleet(t).listen(t)
	const calls = `{"error":"fleetd does not bridge calls between devices; keep the gateway for these, or use another service"}`
	f.do(t, "POST", "/api/call/request", `{"caller_mac":"x","target_mac":"y"}`).is(t, 501, CodeNotImplemented, calls)
	f.do(t, "POST", "/api/call/accept", ``).is(t, 501, CodeNotImplemented, calls)
	const nothing = `{"error":"there is nothing here: POST to /api/commands/{clientId} or /api/devices/status"}`
	for _, path := range []string{"/", "/api/x", "/api/commands", "/api/commands/", commandRobot + "/x"} {
		f.do(t, "POST", path, "{}").is(t, 404, devices.CodeNotFound, nothing)
	}
	f.do(t, "GET", commandRobot, "").is(t, 404, devices.CodeNotFound, nothing)
}

func TestCountsAndLog(t *testing.T) {
	f := newFleet(t).listen(t)
	f.connect(t, robot, devicetest.NewScript())
	operation := f.do(t, "POST", commandRobot, mcp(callVolume)).header.Get(HeaderOperation)
	f.do(t, "POST", commandRobot, `{`)
	f.do(t, "POST", statusPath, `{"clientIds":[]}`, "Authorization", "")
	f.do(t, "POST", statusPath, `{"clientIds":[]}`)
	f.do(t, "POST", "/api/call/accept", `{}`)
	f.do(t, "GET", "/", ``)
	for key, want := range map[RequestKey]int64{{RouteCommands, CodeOK}: 1, {RouteCommands, devices.CodeBadRequest}: 1, {RouteStatus, devices.CodeUnauthorized}: 1,
		{RouteStatus, CodeOK}: 1, {RouteCalls, CodeNotImplemented}: 1, {RouteOther, devices.CodeNotFound}: 1} {
		if got := f.api.Requests.Get(key); got != want {
			t.Errorf("%v: %d, want %d", key, got, want)
		}
	}
	log := f.log.String()
	if n := strings.Count(log, "\n"); n != 5 { // status queries that worked are not worth a line
		t.Errorf("%d lines:\n%s", n, log)
	}
	first, _, _ := strings.Cut(log, "\n")
	for _, want := range []string{"level=INFO", "operation=" + operation, "route=commands", "code=ok", "status=200", "device=" + string(robot), "method=tools/call", `caller="daily token"`} {
		if !strings.Contains(first, want) {
			t.Errorf("%s is not in %s", want, first)
		}
	}
	f.do(t, "POST", commandRobot, mcp(`{"method":"`+strings.Repeat("m", 5000)+`"}`))
	if log := f.log.String(); strings.Contains(log, strings.Repeat("m", maxLoggedMethod+1)) {
		t.Errorf("log has the whole method: %s", log[len(log)-6000:])
	}
}

// TestREADME sends the requests of the gateway's README as curl sends them.
func TestREADME(t *testing.T) {
	f := newFleet(t, func(o *Options) { o.Log = slog.New(slog.DiscardHandler) }).listen(t)
	const clientID = "lichuang-dev@@@a0_85_e3_f4_49_34@@@aeebef32-f0ef-4bce-9d8a-894d91bc6932"
	script := devicetest.NewScript()
	script.Tools = `[{"name":"self.get_device_status","description":"Status.","inputSchema":{"type":"object","properties":{}}}]`
	f.connect(t, "a0:85:e3:f4:49:34", script)
	curl := func(path, data string) *http.Request {
		r, err := http.NewRequestWithContext(t.Context(), "POST", f.url+path, strings.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("User-Agent", "curl/8.5.0")
		r.Header.Set("Accept", "*/*")
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Authorization", "Bearer "+f.gateway.DailyToken(time.Now()))
		return r
	}
	for _, c := range []struct {
		request *http.Request
		want    string
	}{
		{curl("/api/commands/"+clientID, `{"type": "mcp", "payload": {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "self.get_device_status", "arguments": {}}}}`),
			`{"success":true,"data":{"content":[{"type":"text","text":"true"}],"isError":false}}`},
		{curl("/api/devices/status", "{\n    \"deviceIds\": [\n        \""+clientID+"\"\n    ]\n}"), `{"` + clientID + `":{"isAlive":null,"exists":true}}`},
	} {
		w := &strings.Builder{}
		answer, err := http.DefaultClient.Do(c.request)
		if err != nil {
			t.Fatal(err)
		}
		if err := answer.Write(w); err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		head, body, _ := strings.Cut(w.String(), "\r\n\r\n")
		if !strings.HasPrefix(head, "HTTP/1.1 200 OK\r\n") || body != c.want {
			t.Errorf("%s\n%s", head, body)
		}
	}
}
