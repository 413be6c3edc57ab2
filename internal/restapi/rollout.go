package restapi

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/jobs/manager"
)

type rollInput struct {
	DryRun bool   `query:"dry_run" doc:"With true nothing is created: the answer is 200 with what each job would do."`
	Key    string `header:"Idempotency-Key" maxLength:"128" doc:"The caller chooses printable characters. For 7 days, the same key and body answer 200 with the same jobs."`
	Body   api.FirmwareRoll
}

type rollbackInput struct {
	JobPath
	Key string `header:"Idempotency-Key" maxLength:"128" doc:"As with POST /v1/jobs."`
}

func (s *Server) rolloutRoutes(away []devices.Code) {
	refusals := append(away, devices.CodeNotFound, devices.CodeInvalidArguments, devices.CodeConflict, devices.CodeNotEligible, devices.CodeLimitReached)
	roll := s.operation(http.MethodPost, "/v1/firmware/roll", about{id: "rollFirmware", scope: access.ScopeFirmware, tag: tagFirmware, summary: "Roll out a release",
		text:   "One job for each image of the release, under one group; each gives its image to the devices of the selection whose board it is for, in stages, and halts alone. The key needs the scope jobs, too.",
		status: http.StatusCreated, answer: "The jobs.", codes: append(refusals, devices.CodeDeviceUnknown)})
	roll.Responses["200"] = &huma.Response{Description: "The jobs that the same key and body created before; with dry_run, what each job would do.",
		Content: map[string]*huma.MediaType{valueJSON[0]: {Schema: &huma.Schema{OneOf: []*huma.Schema{schemaOf[api.JobGroup](s), schemaOf[api.FirmwareRollPlan](s)}}}}}
	register(s, withAnswer(roll, valueJSON[0], schemaOf[api.JobGroup](s)), s.rollFirmware)
	register(s, s.operation(http.MethodPost, "/v1/jobs/{job}/rollback", about{id: "rollbackJob", scope: access.ScopeJobs, tag: tagJobs, summary: "Take back a firmware job",
		text: "Its waiting tasks are cancelled. Every device that it gave its image gets back what it ran before, if that is stored: one job for each such image, under one group, without stages. " +
			"The key needs the scope firmware, too.",
		status: http.StatusCreated, answer: "The jobs.", codes: refusals}), s.rollbackJob)
	register(s, s.operation(http.MethodDelete, "/v1/devices/{device}/firmware/bar", about{id: "deleteFirmwareBar", scope: access.ScopeFirmware, tag: tagFirmware, summary: "Lift the bar of a device",
		text: "A device that was flashed twice without running the image gets none for 24 hours.", status: http.StatusNoContent, answer: "It may get images.", codes: append(away, devices.CodeDeviceUnknown)}), s.deleteBar)
}

func (s *Server) rollFirmware(ctx context.Context, in *rollInput) (*createdJob, error) {
	if in.DryRun {
		plan, err := s.opt.Jobs.PlanRoll(ctx, caller(ctx), in.Body)
		return &createdJob{http.StatusOK, plan}, err
	}
	group, again, err := s.opt.Jobs.Roll(ctx, caller(ctx), in.Body, manager.CreateOptions{Key: in.Key})
	if err != nil {
		return nil, err
	}
	if again {
		return &createdJob{http.StatusOK, group}, nil
	}
	return &createdJob{http.StatusCreated, group}, nil
}

func (s *Server) rollbackJob(ctx context.Context, in *rollbackInput) (*answer[api.JobGroup], error) {
	group, err := s.opt.Jobs.Rollback(ctx, caller(ctx), in.Job, manager.CreateOptions{Key: in.Key})
	return answerOf(group, err)
}

func (s *Server) deleteBar(ctx context.Context, _ *DevicePath) (*struct{}, error) {
	return nil, s.opt.Jobs.Unbar(ctx, caller(ctx), deviceOf(ctx))
}
