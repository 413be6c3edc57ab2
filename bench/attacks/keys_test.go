package attacks

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/credential"
)

// keyAttacks need an API key, or the gateway's token.
var keyAttacks = []attack{
	{"key-calls", "a device's queue; 4,096 requests of a node", keyCalls},
	{"large-arguments", "64 KiB of arguments", largeArguments},
	{"lists-exports", "200 units of work a second and key", listsExports},
	{"few-rights", "the same", fewRights},
	{"mcp-batches", "100 messages in a body; the same", mcpBatches},
	{"mcp-find", "the same; a search counts as ten", mcpFind},
	{"photos-unread", "30 s in which nothing is taken", photosUnread},
	{"events-unread", "10 s for each event", eventsUnread},
	{"gateway", "the gateway's queue and limits of bodies", gatewayFlood},
	{"nats", "16 connections of a key, 5,000 subscriptions", natsAbuse},
	{"jobs-create", "open jobs and tasks of the fleet", jobsCreate},
	{"jobs-select", "the same", jobsSelect},
	{"jobs-unread", "15 s for each 64 KiB", jobsUnread},
}

const keyWorkers = 32

// keyed lets workers make requests with a key of these scopes.
func (a *attacker) keyed(scopes []string, do func(client *http.Client, token string, round int) string) {
	token := a.key("attacks", scopes...)
	clients := make([]*http.Client, keyWorkers)
	for i := range clients {
		clients[i] = a.client(source(10, i))
	}
	a.workers(len(clients), func(worker, round int) string { return do(clients[worker], token, worker+round) })
}

func keyCalls(a *attacker) {
	a.keyed([]string{"tools:call"}, func(client *http.Client, token string, _ int) string {
		return a.asKey(client, token, http.MethodPost, "/v1/devices/"+a.devices[0]+"/tools/"+tool+"/call", `{"arguments":{"volume":50}}`)
	})
}

func largeArguments(a *attacker) {
	large := []string{
		`{"arguments":{"volume":50,"x":"` + strings.Repeat("a", 60_000) + `"}}`,
		`{"arguments":{"volume":50,"x":` + strings.Repeat("[", 5_000) + strings.Repeat("]", 5_000) + `}}`,
		`{"arguments":{` + strings.Repeat(`"y":0,`, 8_000) + `"volume":50}}`,
		`{"arguments":"` + strings.Repeat("a", 900_000) + `"}`,
	}
	a.keyed([]string{"tools:call"}, func(client *http.Client, token string, round int) string {
		return a.asKey(client, token, http.MethodPost, "/v1/devices/"+a.devices[1]+"/tools/"+tool+"/call", large[round%len(large)])
	})
}

func listsExports(a *attacker) {
	paths := []string{"/v1/devices?limit=1000", "/v1/devices/export", "/v1/devices?q=device&limit=1000", "/v1/fleet?select=room%3Droom-1", "/v1/audit?limit=1000", "/v1/audit/export",
		"/v1/devices/export?format=ndjson", "/v1/changes?limit=1000", "/v1/photos?limit=1000", "/v1/devices?sort=name&limit=1000", "/v1/audit/verify"}
	a.keyed([]string{"devices:read", "events:read", "photos:read", "admin"}, func(client *http.Client, token string, round int) string {
		return a.asKey(client, token, http.MethodGet, paths[round%len(paths)], "")
	})
}

func fewRights(a *attacker) {
	a.keyed([]string{"events:read"}, func(client *http.Client, token string, round int) string {
		switch round % 3 {
		case 0:
			return a.asKey(client, token, http.MethodGet, "/v1/devices/export", "")
		case 1:
			return a.asKey(client, token, http.MethodPost, "/v1/devices/import", "id\n")
		}
		return a.asKey(client, token, http.MethodPost, "/v1/devices/"+a.devices[2]+"/tools/"+tool+"/call", `{"arguments":{"volume":50}}`)
	})
}

// mcpBatches sends bodies of many messages, in a revision that has them.
func mcpBatches(a *attacker) {
	token := a.key("attacks", "devices:read", "tools:call", "events:read")
	var batch []string
	for i := range 100 {
		batch = append(batch, fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":"find_devices","arguments":{"query":"device %d room"}}}`, i+1, i))
	}
	body := "[" + strings.Join(batch, ",") + "]"
	headers := []string{"Authorization", "Bearer " + token, "Content-Type", "application/json", "Accept", "application/json, text/event-stream"}
	a.workers(keyWorkers, func(worker, _ int) string {
		client := a.client(source(10, worker))
		outcome, _, header := a.request(client, http.MethodPost, a.node.Info.API+"/mcp",
			`{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-03-26","capabilities":{},"clientInfo":{"name":"x","version":"1"}}}`, headers...)
		if outcome != "200" {
			a.pause(50 * time.Millisecond)
			return "initialize " + outcome
		}
		session := append(headers, "Mcp-Session-Id", header.Get("Mcp-Session-Id"))
		for a.ctx.Err() == nil {
			outcome, _, _ := a.request(client, http.MethodPost, a.node.Info.API+"/mcp", body, session...)
			a.note("batch " + outcome)
			if outcome == "404" {
				break
			}
		}
		return "end"
	})
}

func mcpFind(a *attacker) {
	const meta = `"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"x","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}`
	queries := []string{"device room", strings.Repeat("lamp ", 200), strings.Repeat("kitchen", 4000), strings.Repeat("x y ", 20_000)}
	a.keyed([]string{"devices:read", "tools:call"}, func(client *http.Client, token string, round int) string {
		name := []string{"find_devices", "search_device_tools"}[round%2]
		return name + " " + a.asKey(client, token, http.MethodPost, "/mcp", `{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"`+name+`","arguments":{"query":"`+queries[round/2%len(queries)]+`"},`+meta+`}}`,
			"Accept", "application/json, text/event-stream", "Mcp-Protocol-Version", "2026-07-28", "Mcp-Method", "tools/call", "Mcp-Name", name)
	})
}

// head is a request that no answer is read of.
func (a *attacker) head(token, path string) (address, request string) {
	u, err := url.Parse(a.node.Info.API)
	if err != nil {
		a.Error(err)
	}
	return u.Host, "GET " + path + " HTTP/1.1\r\nHost: " + u.Host + "\r\nAuthorization: Bearer " + token + "\r\n\r\n"
}

// photosUnread requests photos and does not read them.
func photosUnread(a *attacker) {
	l, err := a.enlist("mqtt")
	if err != nil {
		a.note(err.Error())
		return
	}
	large := append(photo(), make([]byte, 3<<20)...)
	if outcome := a.upload(a.client(nil), l.Device, a.mint.UploadToken(l.Device, time.Now().Add(time.Hour)), large); outcome != "200" {
		a.note("upload " + outcome)
	}
	id := ""
	for p, err := range apiclient.List[api.Photo](a.ctx, a.node.Client, apiclient.Query{"device": l.Device}, "photos") {
		if err != nil {
			a.note(failure(err))
			return
		}
		id = p.ID
	}
	a.unreadBy("/v1/photos/"+id, "photos:read")
}

func eventsUnread(a *attacker) {
	a.unreadBy("/v1/events?last_event_id=0", "events:read", "devices:read")
}

// jobsUnread requests the report of a job with a task for each member.
func jobsUnread(a *attacker) {
	job, err := a.node.CreateJob(a.ctx, api.NewJob{JobSpec: api.JobSpec{Action: api.JobAction{Restart: &api.JobRestart{}}, Select: "device=*",
		When: &api.JobWhen{At: api.At(time.Now().Add(20 * time.Hour))}}}, "")
	if err != nil {
		a.note(failure(err))
		return
	}
	a.unreadBy("/v1/jobs/"+job.ID+"/report", "jobs:read")
}

func (a *attacker) unreadBy(path string, scopes ...string) {
	address, request := a.head(a.key("attacks", scopes...), path)
	a.workers(300, func(worker, _ int) string { return a.unread(address, source(11, worker), request) })
}

// gatewayFlood uses the gateway's API with a valid token.
func gatewayFlood(a *attacker) {
	g, err := credential.NewGateway(gatewayKey)
	if err != nil {
		a.Error(err)
		return
	}
	token := "Bearer " + g.DailyToken(time.Now())
	id := "GID_x@@@" + strings.ReplaceAll(a.devices[3], ":", "_") + "@@@y"
	ids := `"` + id + `"` + strings.Repeat(`,"GID_x@@@02_cc_00_00_00_01@@@y"`, 1500)
	bodies := [][2]string{
		{"/api/devices/status", `{"clientIds":[` + ids + `]}`},
		{"/api/commands/" + id, `{"type":"mcp","payload":{"method":"tools/call","params":{"name":"` + tool + `","arguments":{"volume":5}}}}`},
		{"/api/commands/" + id, string(evilJSON[0])},
		{"/api/commands/" + strings.Repeat("x", 4000), `{}`},
	}
	clients := make([]*http.Client, keyWorkers)
	for i := range clients {
		clients[i] = a.client(source(12, i))
	}
	a.workers(len(clients), func(worker, round int) string {
		b := bodies[(worker+round)%len(bodies)]
		outcome, _, _ := a.request(clients[worker], http.MethodPost, "http://"+a.gateway+b[0], b[1], "Authorization", token, "Content-Type", "application/json")
		return outcome
	})
}

// natsAbuse uses the embedded NATS with a key.
func natsAbuse(a *attacker) {
	k := a.key("attacks", "events:read", "tools:call")
	at, err := url.Parse(a.node.Info.NATS)
	if err != nil {
		a.Error(err)
		return
	}
	subject := "fleetd.v1.cmd." + strings.ReplaceAll(a.devices[4], ":", "") + ".call"
	a.workers(20, func(worker, _ int) string {
		nc, err := nats.Connect("nats://127.0.0.1:"+at.Port(), nats.Token(k), nats.MaxReconnects(0), nats.Timeout(5*time.Second), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
		if err != nil {
			a.pause(20 * time.Millisecond)
			return failure(err)
		}
		defer nc.Close()
		for i := 0; a.ctx.Err() == nil && nc.IsConnected(); i++ {
			switch worker % 3 {
			case 0:
				err = nc.PublishMsg(&nats.Msg{Subject: subject, Header: nats.Header{"Fleetd-Token": {"guess"}}, Data: []byte(`{"tool":"x"}`)})
			case 1:
				_, err = nc.SubscribeSync(fmt.Sprintf("fleetd.v1.devices.%d.online", i))
			default:
				err = nc.Publish(fmt.Sprintf("fleetd.v1.devices.%d.x", i), make([]byte, 1000))
			}
			if err != nil {
				return failure(err)
			}
			a.note("message")
			if i%50 == 0 {
				_ = nc.FlushTimeout(time.Second)
			}
		}
		return "disconnected"
	})
}

// jobsCreate creates jobs that begin tomorrow, one after the other.
func jobsCreate(a *attacker) {
	later := time.Now().Add(20 * time.Hour).UTC().Format(time.RFC3339)
	body := `{"action":{"call":{"tool":"` + tool + `","arguments":{"volume":50}}},"select":"device=` + a.devices[5] + `","when":{"at":"` + later + `"}}`
	a.keyed([]string{"jobs", "jobs:read", "devices:read", "devices:write", "tools:call"}, func(client *http.Client, token string, round int) string {
		return a.asKey(client, token, http.MethodPost, "/v1/jobs", body, "Idempotency-Key", fmt.Sprint("k", round, time.Now().UnixNano()))
	})
}

// jobsSelect creates jobs for the whole fleet, and plans of them.
func jobsSelect(a *attacker) {
	later := time.Now().Add(20 * time.Hour).UTC().Format(time.RFC3339)
	body := `{"action":{"call":{"tool":"` + tool + `","arguments":{"volume":50}}},"select":"device=*","when":{"at":"` + later + `"}}`
	long := `{"action":{"restart":{}},"select":"` + strings.Repeat("room!=x,", 500) + `floor=1"}`
	a.keyed([]string{"jobs", "jobs:read", "devices:read", "devices:write", "tools:call"}, func(client *http.Client, token string, round int) string {
		switch round % 4 {
		case 0:
			return "create " + a.asKey(client, token, http.MethodPost, "/v1/jobs", body, "Idempotency-Key", fmt.Sprint("s", round, time.Now().UnixNano()))
		case 1:
			return "plan " + a.asKey(client, token, http.MethodPost, "/v1/jobs?dry_run=true", body)
		case 2:
			return "long " + a.asKey(client, token, http.MethodPost, "/v1/jobs?dry_run=true", long)
		}
		return "list " + a.asKey(client, token, http.MethodGet, "/v1/jobs?limit=1000", "")
	})
}
