//! The resource under check, freshly built on its dependencies, and calls to it.

use std::cell::RefCell;
use std::sync::Arc;

use resource_api::abi::fault::FaultCell;
use resource_api::abi::object::open;
use resource_api::{
    AdmitOutcome, BuiltResource, Capability, DType, Device, EngineLimits, EngineResourceInfo,
    HostServicesHandle, Interface, Kind, KindHandle, NodeResourceSpec, PublishedInfo, RequestId,
    RequestOverrides, Resource, ResourceError, ResourceHandle, ResourceStep, Result, StepContext,
    StepId, TransferEngineInfo, TypedRef,
};

use super::host::KitHost;
use super::random::mix;
use super::step::{Columns, Step};

/// Limits of the engine that the kit plays: small, so that they are met.
pub const LIMITS: EngineLimits =
    EngineLimits { max_batch: 8, max_batch_tokens: 64, max_model_len: 64 };

/// What is to be checked: a kind, the settings of the resource, and what that is built on.
#[derive(Clone, Debug)]
pub struct Subject {
    /// The kind under check.
    pub kind: KindHandle,
    /// Key and settings of the resource.
    pub spec: NodeResourceSpec,
    /// Kinds and specs of its dependencies, each after those that it is built on itself.
    pub dependencies: Vec<(KindHandle, NodeResourceSpec)>,
}

impl Subject {
    /// A resource of `kind` without dependencies; `settings` is JSON.
    ///
    /// # Errors
    /// When the kind panics while it is asked for its name.
    pub fn new(kind: KindHandle, settings: &str) -> Result<Self> {
        let name = kind.kind();
        kind.object().check_fault()?;
        let spec = spec("under_check", &name, settings);
        Ok(Self { kind, spec, dependencies: Vec::new() })
    }

    /// Builds the resource on the ones below it.
    ///
    /// # Errors
    /// What a kind's `build` says.
    pub fn build(&self, watch: Watch) -> Result<Rig> {
        self.build_with(watch, None)
    }

    /// Likewise, for a worker whose state can go to others in this process.
    ///
    /// # Errors
    /// As there.
    pub fn build_worker(&self, watch: Watch) -> Result<Rig> {
        let (engine, endpoint) = ("in-process".to_string(), String::new());
        self.build_with(watch, Some(TransferEngineInfo { engine, endpoint }))
    }

    fn build_with(&self, watch: Watch, transfer: Option<TransferEngineInfo>) -> Result<Rig> {
        let host = Arc::new(KitHost::default());
        let handle = HostServicesHandle::new(host.clone());
        let mut rig = Rig { host, parts: Vec::new(), columns: RefCell::default(), watch };
        let own = (self.kind.clone(), self.spec.clone());
        for (kind, spec) in self.dependencies.iter().cloned().chain([own]) {
            let mut info = EngineResourceInfo::new(Device::CPU, handle.clone());
            info.kv_dtype = DType::F32;
            info.limits = LIMITS;
            info.transfer_engine_info.clone_from(&transfer);
            info.index = rig.parts.len() as u32;
            for key in unmarked(&kind)?.depends_on(spec.clone())? {
                let at = rig.parts.iter().position(|p| p.spec.resource_key == key);
                if let Some((at, part)) = at.map(|at| (at, &rig.parts[at])) {
                    let dependency = part.built.as_dependency(part.spec.clone(), at as u32);
                    info.dependencies.insert(key, dependency);
                }
            }
            rig.say(&format!("build {}", spec.resource_key));
            let built = unmarked(&kind)?.build(spec.clone(), info)?.named(&spec.resource_key);
            rig.parts.push(Part { spec, built });
        }
        Ok(rig)
    }
}

/// A spec for a resource of the kit's node.
pub fn spec(key: &str, kind: &str, settings: &str) -> NodeResourceSpec {
    NodeResourceSpec {
        resource_key: key.into(),
        kind: kind.into(),
        nodes: ["decoder".to_string()].into(),
        settings: settings.into(),
    }
}

/// The kind with a fault mark of its own, so that a panic over one spec does not stop the others.
pub fn unmarked(kind: &KindHandle) -> Result<KindHandle> {
    let mut object = kind.clone().into_object();
    object.share_fault(FaultCell::shared("the kind"));
    open(object)
}

/// Is told of every operation before it begins.
pub type Watch = fn(&str);

/// One built resource.
#[derive(Debug)]
struct Part {
    spec: NodeResourceSpec,
    built: BuiltResource,
}

/// The resource under check, last, with those that it is built on.
pub struct Rig {
    host: Arc<KitHost>,
    parts: Vec<Part>,
    columns: RefCell<Columns>,
    watch: Watch,
}

/// The plans of a step, by resource.
pub type Plans = Vec<TypedRef<'static>>;

impl Rig {
    /// The resource under check.
    pub fn resource(&self) -> &ResourceHandle {
        &self.subject().built.resource
    }

    /// What it offers.
    pub fn capabilities(&self) -> &[Capability] {
        &self.subject().built.capabilities
    }

    /// Index of the resource under check.
    pub fn index(&self) -> usize {
        self.parts.len() - 1
    }

    /// What is offered under this interface: by the resource under check, or else by the last
    /// dependency that does, with its index.
    pub fn capability<H: Interface>(&self) -> Option<(usize, H)> {
        let offers = self.parts.iter().enumerate().rev();
        offers
            .flat_map(|(i, p)| p.built.capabilities.iter().map(move |c| (i, c)))
            .find_map(|(i, c)| Some((i, c.open::<H>().ok()?)))
    }

    /// The interface as the resource under check itself offers it.
    pub fn own<H: Interface>(&self) -> Option<H> {
        self.capability::<H>().filter(|(i, _)| *i == self.index()).map(|(_, h)| h)
    }

    /// The resource with this index.
    pub fn part(&self, index: usize) -> &ResourceHandle {
        &self.parts[index].built.resource
    }

    /// The host.
    pub fn host(&self) -> &Arc<KitHost> {
        &self.host
    }

    /// Tells the watcher what comes next.
    pub fn say(&self, what: &str) {
        (self.watch)(what);
    }

    /// Fails if the resource under check has panicked.
    pub fn check_fault(&self) -> std::result::Result<(), String> {
        let fault = self.resource().object().check_fault();
        let lent = self.capabilities().iter().map(|_| fault.clone());
        fault.clone().and(lent.collect()).map_err(|_| "it panicked".to_string())
    }

    fn subject(&self) -> &Part {
        // `build` pushes the subject last and fails otherwise.
        &self.parts[self.parts.len() - 1]
    }

    /// Calls `f` with the step as the resource with this index sees it.
    pub fn call<R>(
        &self,
        step: &Step,
        index: usize,
        plans: &[TypedRef<'static>],
        f: impl FnOnce(&ResourceStep<'_>, &StepContext<'_>) -> R,
    ) -> R {
        self.columns.borrow_mut().lend(step, index == self.index(), plans, f)
    }

    /// Tells every resource of a request.
    ///
    /// # Errors
    /// The first that does not want it.
    pub fn ingest(&self, rid: RequestId, prompt: &[u32]) -> Result<()> {
        self.ingest_as(rid, prompt, "")
    }

    /// Likewise, with settings of the request for the resource under check.
    ///
    /// # Errors
    /// The first that does not want it.
    pub fn ingest_as(&self, rid: RequestId, prompt: &[u32], text: &str) -> Result<()> {
        self.say(&format!("ingest_request {rid}"));
        let prompt = prompt.to_vec();
        (0..self.parts.len()).try_for_each(|i| {
            let text = if i == self.index() { text } else { "" };
            let overrides = RequestOverrides::new(text, &prompt, 2);
            self.part(i).ingest_request(rid, &overrides)
        })
    }

    /// Calls a method of all resources, last first, and gives the first error.
    ///
    /// # Errors
    /// See above; all are called nevertheless.
    pub fn each(&self, what: &str, f: impl Fn(&ResourceHandle) -> Result<()>) -> Result<()> {
        self.say(what);
        let all = self.parts.iter().rev().map(|p| f(&p.built.resource));
        first_error(all)
    }

    /// Removes a request everywhere.
    ///
    /// # Errors
    /// As for [`Rig::each`].
    pub fn remove(&self, rid: RequestId) -> Result<()> {
        self.each(&format!("remove_request {rid}"), |r| r.remove_request(rid))
    }

    /// Admits a step, dependencies first; rolls back what was reached where one does not.
    ///
    /// # Errors
    /// What `admit` fails with.
    pub fn admit(&self, step: &Step) -> Result<AdmitOutcome> {
        for i in 0..self.parts.len() {
            self.say(&format!("admit {step}"));
            let answer = self.call(step, i, &[], |s, c| self.part(i).admit(s, c));
            if !answer.as_ref().is_ok_and(AdmitOutcome::is_ready) {
                self.roll_back(step, i + 1)?;
                if step.staged {
                    self.clear(step)?;
                }
                return answer;
            }
        }
        Ok(AdmitOutcome::OK)
    }

    /// Plans a step, dependencies first; rolls it back where one cannot.
    ///
    /// # Errors
    /// What `plan` fails with.
    pub fn plan(&self, step: &Step) -> Result<Plans> {
        let mut plans = vec![TypedRef::NONE; self.parts.len()];
        for i in 0..self.parts.len() {
            self.say(&format!("plan {step}"));
            match self.call(step, i, &plans, |s, c| self.part(i).plan(s, c)) {
                Ok(plan) => plans[i] = plan.into_result(),
                Err(e) => {
                    self.rollback(step)?;
                    return Err(e);
                }
            }
        }
        Ok(plans)
    }

    /// Commits a step.
    ///
    /// # Errors
    /// The first that fails; the others commit.
    pub fn commit(&self, step: &Step, plans: &[TypedRef<'static>]) -> Result<()> {
        self.say(&format!("commit {step}"));
        let all = (0..self.parts.len())
            .map(|i| self.call(step, i, plans, |s, c| self.part(i).commit(s, c)));
        first_error(all)
    }

    /// Rolls a step back everywhere.
    ///
    /// # Errors
    /// The first that fails; the others are called.
    pub fn rollback(&self, step: &Step) -> Result<()> {
        self.roll_back(step, self.parts.len())
    }

    fn roll_back(&self, step: &Step, reached: usize) -> Result<()> {
        self.say(&format!("rollback_admit {step}"));
        let all = (0..reached)
            .rev()
            .map(|i| self.call(step, i, &[], |s, c| self.part(i).rollback_admit(s, c)));
        first_error(all)
    }

    /// Drops a staged step.
    ///
    /// # Errors
    /// As for [`Rig::each`].
    pub fn clear(&self, step: &Step) -> Result<()> {
        let id = StepId(step.id);
        self.each(&format!("clear_preplan {step}"), |r| r.clear_preplan(Some(id)))
    }

    /// Whether everything in the chain can be planned ahead.
    pub fn can_stage(&self) -> bool {
        self.parts.iter().all(|p| p.built.resource.supports_preplan())
    }

    /// Shuts down as a host does: `cleanup` and an empty `bind`, dependents first, then drops. Gives
    /// the bytes that were not given back.
    pub fn shut_down(self) -> u64 {
        (self.watch)("cleanup and drop");
        let Rig { host, mut parts, .. } = self;
        for part in parts.iter().rev() {
            // What these say is asked elsewhere; dropping must work all the same.
            let _ = part.built.resource.cleanup();
            let _ = part.built.resource.bind(Vec::new());
        }
        while parts.pop().is_some() {}
        host.join();
        host.reserved()
    }
}

/// Goes through all of them, and gives the first that failed.
fn first_error(all: impl Iterator<Item = Result<()>>) -> Result<()> {
    let mut first = Ok(());
    for next in all {
        if first.is_ok() {
            first = next;
        }
    }
    first
}

/// What was published, in so many words that two are told apart.
pub fn shown(info: Option<&PublishedInfo>) -> String {
    let Some(info) = info else { return "nothing".into() };
    let sum = |body: &[u8]| body.iter().fold(0, |sum, &byte| mix(sum ^ u64::from(byte)));
    let entry = |(name, order, body): (&str, u64, &[u8])| {
        format!(" {name}@{order} of {} bytes, {:08x}", body.len(), sum(body) as u32)
    };
    let entries: String = info.entries().map(entry).collect();
    format!("{}/{}{entries}", info.kind(), info.version())
}

/// An error's text with its kind, for findings.
pub fn told(e: &ResourceError) -> String {
    format!("{}: {e}", e.kind().name())
}
